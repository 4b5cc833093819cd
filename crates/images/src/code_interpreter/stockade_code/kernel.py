"""Loaded by every Python kernel: environment per run, charts and tables as data, pictures shown, `exit()` ignored.

Nothing big is imported here. What concerns a library is done when the code first imports it.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import traceback

from IPython.core.error import UsageError
from IPython.core.formatters import BaseFormatter
from IPython.display import display
from jupyter_client.jsonutil import json_clean, json_default
from traitlets import ObjectName, Unicode

from .charts import chart_of, note_boxes


def load_ipython_extension(shell):
    """Called by IPython."""
    Environment(shell)
    shell.kernel.session.pack = pack
    # Code that was written as a program ends in `exit()`; the state is wanted by the next run all the same.
    shell.ask_exit = lambda: None
    shell.showtraceback = Errors(shell).show
    formatters = shell.display_formatter.formatters
    formatters["e2b/chart"] = ChartFormatter(parent=shell.display_formatter)
    formatters["e2b/data"] = TableFormatter(parent=shell.display_formatter)
    for module in ("pandas", "pandas.core.frame"):
        formatters["e2b/data"].for_type_by_name(module, "DataFrame", table_of)
    sys.meta_path.insert(0, AfterImport({"matplotlib.axes": note_boxes, "pandas": set_up_pandas, "PIL.Image": set_up_pillow}))


def pack(message):
    """A message as JSON, whatever text is in it: half a surrogate pair goes as its escape, what is no number as null."""
    try:
        text = json.dumps(message, default=json_default, allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(json_clean(message), default=json_default, allow_nan=False)
    return text.encode("ascii")


class Errors:
    """Reports as errors what IPython prints only: groups of exceptions, and magics that were used wrongly."""

    def __init__(self, shell):
        self.shell = shell
        self.show_others = shell.showtraceback

    def show(self, exc_tuple=None, *args, **options):
        kind, value, trace = exc_tuple or sys.exc_info()
        if isinstance(value, UsageError):
            lines = [f"UsageError: {value}"]
        elif holds_group(value):
            # The first frame is IPython's.
            lines = "".join(traceback.format_exception(kind, value, trace.tb_next or trace if trace else None)).splitlines()
        else:
            self.show_others(exc_tuple, *args, **options)
            return
        self.shell._showtraceback(kind, value, lines)


def holds_group(value):
    """Whether an exception is a group, or came while one was handled."""
    seen = set()
    while value is not None and id(value) not in seen:
        if isinstance(value, BaseExceptionGroup):
            return True
        seen.add(id(value))
        value = value.__context__
    return False


class Environment:
    """Sets the variables that came beside the code, and puts back those that are for one run only."""

    def __init__(self, shell):
        self.shell = shell
        self.before = {}
        shell.events.register("pre_run_cell", self.enter)
        shell.events.register("post_run_cell", self.leave)

    def enter(self, _info):
        metadata = self.shell.kernel.get_parent().get("metadata", {})
        os.environ.update(metadata.get("sandbox_env", {}))
        run = metadata.get("run_env", {})
        self.before = {name: os.environ.get(name) for name in run}
        os.environ.update(run)

    def leave(self, _result):
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.before = {}


class ChartFormatter(BaseFormatter):
    """A figure's data. Not registered by type: matplotlib's backend takes back whatever is, for figures."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, value):
        if not any((base.__module__, base.__name__) == ("matplotlib.figure", "Figure") for base in type(value).__mro__):
            return None
        try:
            return chart_of(value)
        except Exception:  # The picture is there; what cannot be taken apart is no error of the code.
            return None


class TableFormatter(BaseFormatter):
    """A table's columns."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict


def table_of(frame):
    """Columns by name; dates as ISO text, other objects as they show themselves."""
    split = json.loads(frame.to_json(orient="split", date_format="iso", default_handler=str))
    return {str(name): [row[index] for row in split["data"]] for index, name in enumerate(split["columns"])}


def set_up_pandas(pandas):
    """Tables whole, and the same whatever the terminal."""
    pandas.set_option("display.max_columns", 200)
    pandas.set_option("display.width", 200)


def set_up_pillow(module):
    """Pictures that are shown or saved are results."""
    original = module.Image.save

    def show(image, *_args, **_kwargs):
        display(image)

    def save(image, fp, format=None, **params):  # noqa: A002, as the library names it
        # matplotlib saves its figures this way; they are shown as figures.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(fp, (str, os.PathLike)) and not caller.startswith("matplotlib"):
            display(image)
        return original(image, fp, format, **params)

    module.Image.show = show
    module.Image.save = save


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function once its module has been imported."""

    def __init__(self, functions):
        self.functions = functions

    def find_spec(self, name, path=None, target=None):
        function = self.functions.pop(name, None)
        if function is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        original = spec.loader.exec_module

        def exec_module(module):
            original(module)
            function(module)

        spec.loader.exec_module = exec_module
        return spec
