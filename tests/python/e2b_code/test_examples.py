"""Programs written for E2B run with nothing changed but the environment."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples/e2b"


def output_of(*arguments):
    ended = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_analysis_of_a_table(tmp_path):
    picture = tmp_path / "picture.png"
    assert output_of(EXAMPLES / "analyse.py", picture) == "slope 3.0 chart scatter\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_loop_of_an_agent():
    assert output_of(EXAMPLES / "agent_loop.py") == "There are 10 primes below 30; their sum is 129.\n"


@pytest.mark.current
def test_an_agent_of_langgraph():
    assert output_of(EXAMPLES / "langgraph_agent.py") == "The table has 3 lines; its numbers add up to 21.\n"
