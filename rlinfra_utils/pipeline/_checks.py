"""The doors of `rlinfra_utils.doors`, under the name that one file here still uses."""

from rlinfra_utils.doors import *  # noqa: F403
