"""The asynchronous classes of the SDK, used as their synchronous twins are, so that one test serves both."""

import asyncio
import inspect
import threading

_loop = asyncio.new_event_loop()
threading.Thread(target=_loop.run_forever, daemon=True).start()


def blocking(value):
    """Awaits what is awaitable, and lets callers call what is asynchronous as if it were not."""
    if inspect.isawaitable(value):
        return blocking(asyncio.run_coroutine_threadsafe(_awaited(value), _loop).result(timeout=300))
    if isinstance(value, list):
        return [blocking(one) for one in value]
    if hasattr(value, "__aiter__") and not _is_asynchronous(value):
        return iter(blocking(_collected(value)))
    if _is_asynchronous(value) or inspect.isroutine(value):
        return Blocking(value)
    return value


class Blocking:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return blocking(getattr(self.inner, name))

    def __call__(self, *arguments, **options):
        return blocking(_call(self.inner, arguments, options))


async def _awaited(value):
    return await value


async def _called(function, arguments, options):
    return function(*arguments, **options)


def _call(function, arguments, options):
    """In the loop, which some constructors look for."""
    return asyncio.run_coroutine_threadsafe(_called(function, arguments, options), _loop).result(timeout=300)


async def _collected(pieces):
    return [piece async for piece in pieces]


def _is_asynchronous(value):
    kind = value if inspect.isclass(value) else type(value)
    return kind.__module__.startswith("e2b") and "_async" in kind.__module__ and not issubclass(kind, Exception)
