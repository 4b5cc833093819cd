"""Running code: output, results, errors, state."""

import base64
import io

import pytest
from conftest import PATIENCE_S, cells, stdout
from e2b_code_interpreter import Sandbox


def test_a_value_is_the_main_result(run):
    execution = run("1 + 1")
    assert execution.text == "2"
    assert execution.results[0].is_main_result
    assert execution.error is None
    assert execution.execution_count >= 1


def test_state_stays_and_runs_are_counted(run):
    first = run("x = 41")
    second = run("x + 1; x + 1")
    assert second.text == "42"
    assert second.execution_count == first.execution_count + 1


def test_output_comes_in_order_to_the_callbacks(run):
    seen = []
    execution = run(
        "import sys, time\nprint('one'); time.sleep(0.3)\nprint('two', file=sys.stderr); time.sleep(0.3)\nprint('three')\n4",
        on_stdout=lambda message: seen.append(("out", message.line)),
        on_stderr=lambda message: seen.append(("err", message.line)),
        on_result=lambda result: seen.append(("result", result.text)),
    )
    text = "".join(f"{kind}:{line}" for kind, line in seen)
    assert text.replace("\n", ";") == "out:one;err:two;out:three;result:4"
    assert stdout(execution) == "one\nthree\n"
    assert execution.logs.stderr == ["two\n"]


@pytest.mark.parametrize(
    ("code", "name", "value"),
    [
        ("raise ExceptionGroup('several', [ValueError('inner')])", "ExceptionGroup", "several (1 sub-exception)"),
        ("try: 1 / 0\nexcept ZeroDivisionError as e: raise ExceptionGroup('g', [e])", "ExceptionGroup", "g (1 sub-exception)"),
        ("%no_such_magic", "UsageError", "Line magic function `%no_such_magic` not found."),
    ],
)
def test_errors_that_ipython_only_prints_are_errors(run, code, name, value):
    error = run(code).error
    assert (error.name, error.value) == (name, value)
    assert value in error.traceback


def test_an_error_has_name_value_and_traceback(run):
    seen = []
    execution = run("def f():\n    return 1 / 0\nf()", on_error=seen.append)
    assert (execution.error.name, execution.error.value) == ("ZeroDivisionError", "division by zero")
    assert "in f()" in execution.error.traceback or "f()" in execution.error.traceback
    assert [error.name for error in seen] == ["ZeroDivisionError"]
    assert run("2").text == "2"


def test_text_that_is_no_unicode_is_shown_by_its_escapes(run):
    execution = run("print('caf\\ud800')\n'\\udfff'")
    assert (stdout(execution), execution.text) == ("caf\\ud800\n", "\\udfff")
    failed = run("raise Exception('caf\\ud800')")
    assert (failed.error.name, failed.error.value) == ("Exception", "caf\\ud800")
    assert run("2").text == "2"


def test_code_that_ends_like_a_program_keeps_its_state(run):
    for ending in ("exit()", "quit()", "exit"):
        execution = run(f"kept = {ending!r}\nprint('done')\n{ending}")
        assert (execution.error, stdout(execution)) == (None, "done\n")
        assert run("kept").text == ending
    assert run("import sys; sys.exit(3)").error.name == "SystemExit"
    assert run("kept").text == "exit"


def test_a_syntax_error_is_an_error(run):
    assert run("1 +* 2").error.name == "SyntaxError"


@pytest.mark.surface
def test_every_form_of_a_result_arrives_under_its_name(run):
    execution = run(
        "from IPython.display import *\n"
        "display(HTML('<b>h</b>'), Markdown('*m*'), Latex('$l$'), JSON({'j': [1]}), Javascript('1'), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))\n"
        "display({'application/x-own': 'o', 'text/plain': 'p'}, raw=True)\n"
        "display({'application/pdf': 'UERG', 'image/png': 'UE5H', 'image/jpeg': 'SlBH', 'e2b/data': {'a': [1]}}, raw=True)\n"
        "'quoted'"
    )
    html, markdown, latex, json_, javascript, svg, own, raw, main = execution.results
    assert (html.html, markdown.markdown, latex.latex) == ("<b>h</b>", "*m*", "$l$")
    assert (json_.json, javascript.javascript) == ({"j": [1]}, "1")
    assert (raw.pdf, raw.png, raw.jpeg, raw.data) == ("UERG", "UE5H", "SlBH", {"a": [1]})
    assert html["html"] == html._repr_html_() == "<b>h</b>"
    assert "<svg" in svg.svg
    assert own.extra == {"application/x-own": "o"} and own.text == "p"
    assert main.text == "quoted" and main.is_main_result and not html.is_main_result
    assert "application/x-own" in own.formats()


def test_pictures_are_results(run):
    from PIL import Image

    code = (
        "from PIL import Image\nimage = Image.new('RGB', (3, 2), 'red')\n"
        "image.show()\nimage.save('/tmp/picture.png')\nimage.save('/tmp/picture.jpg')\nimage"
    )
    results = run(code).results
    assert len(results) == 4
    for result in results:
        assert Image.open(io.BytesIO(base64.b64decode(result.png))).size == (3, 2)


def test_a_table_comes_as_text_html_and_data(run):
    execution = run("import pandas as pd\npd.DataFrame({'a': [1, 2], 'd': pd.to_datetime(['2026-01-01', '2026-01-02'])})")
    result = execution.results[0]
    assert "<table" in result.html and "2026-01-02" in result.text
    assert result.data["a"] == [1, 2]
    assert result.data["d"][0].startswith("2026-01-01")


@pytest.mark.long
def test_wide_tables_are_whole_whatever_the_terminal(run):
    (code,) = cells("code_wide.py")
    narrow, wide = (run(code, envs={"COLUMNS": columns}).results[0] for columns in ("40", "200"))
    assert all(f"col_{index:02d}" in narrow.html for index in range(24))
    assert narrow.text == wide.text


def test_charts_come_out_once_each(run):
    from PIL import Image

    bar, lines, none = (run(cell) for cell in cells("code_charts.py"))
    (result,) = bar.results
    assert Image.open(io.BytesIO(base64.b64decode(result.png))).size[0] > 100
    chart = result.chart
    assert (chart.type.value, chart.title, chart.x_label, chart.y_label) == ("bar", "One", "name", "count")
    assert [(element.label, element.value) for element in chart.elements] == [("A", 3), ("B", 1), ("C", 2)]
    assert [result.chart.title for result in lines.results] == ["Two-1", "Two-2"]
    assert lines.results[1].chart.elements[0].points == [(0, 0), (1, 2), (2, 8)] or [
        list(point) for point in lines.results[1].chart.elements[0].points
    ] == [[0, 0], [1, 2], [2, 8]]
    assert not none.results and stdout(none) == "no figure here\n"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("scatter", "plt.scatter([1, 2], [3, 4])"),
        ("pie", "plt.pie([1, 3], labels=['a', 'b'])"),
        ("superchart", "f, (a, b) = plt.subplots(1, 2); a.plot([1, 2]); b.bar(['x'], [1])"),
    ],
)
def test_charts_say_what_they_are(run, kind, code):
    (result,) = [result for result in run(f"import matplotlib.pyplot as plt\n{code}\nplt.show()").results if result.png]
    assert result.chart.type.value == kind


BOX = {"first_quartile": 2, "median": 3, "third_quartile": 4}


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("plt.boxplot([1, 2, 3, 4, 20], tick_labels=['a'])", "a"),
        ("plt.boxplot([1, 2, 3, 4, 20], tick_labels=['a'], patch_artist=True, orientation='horizontal')", "a"),
        ("pd.DataFrame({'b': [1, 2, 3, 4, 20]}).plot.box()", "b"),
        pytest.param("import seaborn; seaborn.boxplot(x=['c'] * 5, y=[1, 2, 3, 4, 20])", "c", marks=pytest.mark.long),
    ],
    ids=["lines", "patches, lying", "pandas", "seaborn"],
)
def test_box_plots_say_what_they_were_drawn_of(run, code, label):
    results = run(f"import matplotlib.pyplot as plt, pandas as pd\n{code}\nplt.show()").results
    (result,) = [result for result in results if result.png]
    assert result.chart.type.value == "box_and_whisker"
    (box,) = result.chart.elements
    assert {name: getattr(box, name) for name in BOX} == BOX
    assert (box.label, box.min, box.max, box.outliers) == (label, 1, 4, [20])


def test_await_magics_and_the_shell(run):
    assert run("import asyncio\nawait asyncio.sleep(0.01)\n'awaited'").text == "awaited"
    # IPython reads a terminal, with pexpect: that loses what a command writes in the moment it ends.
    assert stdout(run("!pwd; sleep 1")).strip() == "/home/user"
    assert run("%who_ls").error is None
    assert run("input('?')").error.name == "StdinNotImplementedError"


@pytest.mark.long
def test_the_data_stack_is_there(run):
    code = "import bs4, lxml, matplotlib, numpy, openpyxl, pandas, PIL, plotly, requests, scipy, seaborn, sklearn, sympy\n'all'"
    execution = run(code)
    assert execution.error is None and execution.text == "all"


def test_environment_of_the_sandbox_and_of_one_run(run, box):
    code = "import os\n(os.environ.get('FROM_SANDBOX'), os.environ.get('ONCE'), os.environ['E2B_SANDBOX_ID'])"
    assert run(code, envs={"ONCE": "1"}).text == f"('seen', '1', '{box.sandbox_id}')"
    assert run(code).text == f"('seen', None, '{box.sandbox_id}')"
    assert run(code, envs={"FROM_SANDBOX": "over"}).text.startswith("('over'")
    assert run(code).text.startswith("('seen'")


@pytest.mark.long
def test_short_cells_in_a_row(run, box):
    (code,) = cells("code_steady.py")
    context = box.create_code_context(request_timeout=PATIENCE_S)
    for number in range(1, 21):
        execution = run(code, context=context)
        assert execution.error is None
        assert (stdout(execution), execution.text) == (f"run {number} 407\n", str(number))
    box.remove_code_context(context)


@pytest.mark.long
def test_much_output_arrives_whole(run):
    seen = []
    execution = run("for i in range(20): print(chr(97 + i) * 1_000_000)", on_stdout=lambda message: seen.append(len(message.line)))
    assert execution.error is None
    assert sum(seen) == 20 * 1_000_001


def test_files_and_code_see_each_other(run, box):
    box.files.write("/home/user/in.txt", "from outside")
    assert run("open('in.txt').read()").text == "from outside"
    run("open('/home/user/out.txt', 'w').write('from inside')")
    assert box.files.read("/home/user/out.txt") == "from inside"
    assert box.commands.run("cat /home/user/out.txt").stdout == "from inside"


@pytest.mark.long
def test_state_survives_a_pause():
    box = Sandbox.create(timeout=900)
    try:
        box.run_code("kept = list(range(3))")
        box.pause()
        again = Sandbox.connect(box.sandbox_id, timeout=900)
        assert again.run_code("sum(kept)", timeout=PATIENCE_S).text == "3"
    finally:
        box.kill()
