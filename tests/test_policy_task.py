"""The arithmetic task: what is asked, and exactly what the verifier accepts."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.policy import MAX_ANSWER_CHARS, REWARD_WEIGHTS, prompts, total_reward, verify

RIGHT, CORRECT_ONLY, WRONG_BUT_WELL_FORMED, NOTHING = (1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)


@given(num=st.integers(1, 50), seed=st.integers(0, 2**40), digits=st.integers(1, MAX_ANSWER_CHARS - 1))
def test_prompts_are_sums_of_the_right_size_and_repeat_by_seed(num, seed, digits):
    batch = prompts(num, seed, digits)
    assert batch == prompts(num, seed, digits)
    assert len(batch) == num
    for prompt in batch:
        left, right = re.fullmatch(r"(\d+)\+(\d+)=", prompt.text).groups()
        assert len(left) == len(right) == digits
        assert prompt.answer == int(left) + int(right)
        assert len(str(prompt.answer)) <= MAX_ANSWER_CHARS


def test_seeds_differ_and_ids_name_the_problem():
    assert [p.text for p in prompts(20, 0)] != [p.text for p in prompts(20, 1)]
    batch = prompts(2000, 3, digits=1)
    assert len({p.prompt_id for p in batch}) == len({p.text for p in batch}) == 100  # 0+0 to 9+9, all of them drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "num=0"),
        ((-3, 0), "num=-3"),
        (("5", 0), "num='5'"),
        ((1, None), "seed=None"),  # Python's generator would take it for the clock
        ((1, 0, 0), "digits=0"),
        ((1, 0, 64), "digits=64"),
    ],
)
def test_prompts_refuse_senseless_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        prompts(*arguments)


@pytest.mark.parametrize(
    ("text", "answer", "rewards"),
    [
        ("42", 42, RIGHT),
        ("0", 0, RIGHT),
        ("108", 108, RIGHT),
        ("43", 42, WRONG_BUT_WELL_FORMED),
        ("4", 42, WRONG_BUT_WELL_FORMED),
        ("420", 42, WRONG_BUT_WELL_FORMED),
        # Lenient in two ways: leading zeros, and ASCII spaces at the ends.
        ("042", 42, CORRECT_ONLY),
        ("00", 0, CORRECT_ONLY),
        ("42 ", 42, CORRECT_ONLY),
        (" 42", 42, CORRECT_ONLY),
        ("  042  ", 42, CORRECT_ONLY),
        ("043", 42, NOTHING),
        # Nothing else.
        ("", 42, NOTHING),
        (" ", 0, NOTHING),
        ("+42", 42, NOTHING),
        ("-42", -42, NOTHING),
        ("-0", 0, NOTHING),
        ("42.0", 42, NOTHING),
        ("42.", 42, NOTHING),
        ("4_2", 42, NOTHING),
        ("4 2", 42, NOTHING),
        ("4,2", 42, NOTHING),
        ("0x2a", 42, NOTHING),
        ("4.2e1", 42, NOTHING),
        ("42=", 42, NOTHING),
        ("=42", 42, NOTHING),
        ("40+2", 42, NOTHING),
        ("12+30=42", 42, NOTHING),
        ("forty-two", 42, NOTHING),
        ("42\n", 42, NOTHING),
        ("\n42", 42, NOTHING),
        ("42\t", 42, NOTHING),
        ("42\r\n", 42, NOTHING),
        ("42\u00a0", 42, NOTHING),  # no-break space
        ("42\u200b", 42, NOTHING),  # zero-width space
        ("\ufeff42", 42, NOTHING),  # byte order mark
        ("42\x00", 42, NOTHING),
        ("\x0042", 42, NOTHING),
        ("4\x082", 42, NOTHING),
        ("\u202e24", 42, NOTHING),  # right-to-left override: shown as 42
        ("٤٢", 42, NOTHING),  # Arabic-Indic digits, which int() reads
        ("４２", 42, NOTHING),  # full-width digits, which int() reads
        ("४२", 42, NOTHING),  # Devanagari digits, which int() reads
        ("4²", 42, NOTHING),
        ("42\ud800", 42, NOTHING),  # a lone surrogate
        ("42<eos>", 42, NOTHING),
        ("4<pad>2", 42, NOTHING),
        ("<bos>42", 42, NOTHING),
        # Length: read up to the limit, not beyond it.
        ("0" * (MAX_ANSWER_CHARS - 2) + "42", 42, CORRECT_ONLY),
        ("0" * (MAX_ANSWER_CHARS - 1) + "42", 42, NOTHING),
        ("9" * MAX_ANSWER_CHARS, 10**MAX_ANSWER_CHARS - 1, RIGHT),
        ("9" * 5000, 42, NOTHING),  # beyond the digits that int() agrees to read
    ],
)
def test_the_verifier_accepts_exactly_this(text, answer, rewards):
    assert verify(text, answer, truncated=False) == {"correctness": rewards[0], "format": rewards[1]}
    assert verify(text, answer, truncated=True) == {"correctness": 0.0, "format": 0.0}


@pytest.mark.parametrize("piece", ["4", " ", "\x00", "٤", "<eos>", "42\n"])
def test_ten_megabytes_are_not_read(piece):
    text = piece * (10_000_000 // len(piece))
    assert verify(text, 42, truncated=False) == {"correctness": 0.0, "format": 0.0}


@given(
    text=st.one_of(st.text(max_size=80), st.text("0123456789 +-=.", max_size=8)),
    answer=st.integers(-5, 300),
)
def test_any_text_gets_a_reward_and_the_grammar_is_the_documented_one(text, answer):
    """The oracle reads character by character, without regular expressions."""
    digits = text.strip(" ")
    is_number = len(digits) > 0 and all("0" <= char <= "9" for char in digits) and len(text) <= MAX_ANSWER_CHARS
    is_canonical = is_number and digits == text and (digits == "0" or digits[0] != "0")
    expected = {"correctness": float(is_number and int(digits) == answer), "format": float(is_canonical)}
    assert verify(text, answer, truncated=False) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 42, False), "text has type NoneType"),
        ((b"42", 42, False), "text has type bytes"),
        ((["4", "2"], 42, False), "text has type list"),
        (("42", "42", False), "answer has type str"),
        (("42", 42.0, False), "answer has type float"),
        (("42", 42, "eos"), "truncated has type str"),
        (("42", 42, None), "truncated has type NoneType"),
    ],
)
def test_the_verifier_refuses_what_is_no_answer(arguments, message):
    with pytest.raises(TypeError, match=message):
        verify(*arguments)


def test_total_reward_weighs_the_parts():
    assert total_reward({"correctness": 1.0, "format": 1.0}) == pytest.approx(1.0)
    assert total_reward({"correctness": 0.0, "format": 0.0}) == 0.0
    assert total_reward({"correctness": 1.0, "format": 0.0}) == REWARD_WEIGHTS["correctness"]
    assert total_reward({"correctness": 0.0, "format": 1.0}) == REWARD_WEIGHTS["format"]
    assert REWARD_WEIGHTS["correctness"] > REWARD_WEIGHTS["format"]
    with pytest.raises(KeyError):
        total_reward({"correctness": 1.0})
