"""The frame of the pages that a run writes beside the lessons: one style, light or dark as the reader's system is.

No scripts, fonts or pictures from elsewhere, and links are relative, so the folder can be moved or served. Leaves out
the lessons themselves, which nbconvert draws (`page.py`). Use: `shell.page("Results", "What it shows.", body_html)`.
"""

from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6b7b; --paper: #fbfcfd; --card: #fff; --line: #dfe5ea;
  --link: #0b62a8; --ok: #1a7f4b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4eaf0; --soft: #9aaaba; --paper: #12181f; --card: #19212a; --line: #2c3742; --link: #74b8f2;
    --ok: #5fc98f; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 .8rem; }
p.lead { color: var(--soft); margin: 0 0 1.5rem; max-width: 44rem; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
nav { margin: 0 0 1.5rem; display: flex; flex-wrap: wrap; gap: .5rem 1.25rem; }
ol, .card { list-style: none; margin: 0; padding: 0; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card); overflow: hidden; }
li { display: grid; grid-template-columns: 1fr auto; gap: .1rem 1.5rem; padding: 1rem 1.25rem; }
li + li { border-top: 1px solid var(--line); }
li > a { font-weight: 600; font-size: 1.05rem; }
.run { color: var(--soft); font-size: .875rem; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.about, figcaption { color: var(--soft); font-size: .94rem; }
.ok { color: var(--ok); font-weight: 600; }
.failed { color: var(--bad); font-weight: 600; }
.error { grid-column: 1 / -1; color: var(--bad); font: .82rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: 1.25rem; }
figure { margin: 0; padding: .75rem; border: 1px solid var(--line); border-radius: 12px; background: var(--card); }
figure img { width: 100%; height: auto; background: #fff; border-radius: 6px; display: block; }
figcaption { padding-top: .6rem; }
details { padding: .7rem 1.25rem; }
details + details { border-top: 1px solid var(--line); }
summary { cursor: pointer; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; margin: .6rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--soft); min-width: 9rem; }
footer { color: var(--soft); font-size: .875rem; margin-top: 1.5rem; }
@media (max-width: 40rem) { li { grid-template-columns: 1fr; } .run { text-align: left; } }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="lead">{lead}</p>
{body}
</main>
</body>
</html>
"""


def page(title: str, lead: str, body: str) -> str:
    """Return a whole HTML page; `title` and `lead` are plain text, `body` is HTML."""
    return PAGE.format(title=escape(title), lead=escape(lead), style=STYLE, body=body)
