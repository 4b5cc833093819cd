"""The asynchronous client: each of its methods once."""

import asyncio

import pytest
from conftest import PATIENCE_S
from e2b.exceptions import NotFoundException
from e2b_code_interpreter import AsyncSandbox


def test_code_and_contexts(box):
    async def story():
        sandbox = await AsyncSandbox.connect(box.sandbox_id)
        patient = {"timeout": PATIENCE_S, "request_timeout": PATIENCE_S}
        seen = []
        execution = await sandbox.run_code("print('out')\n40 + 2", on_stdout=lambda message: seen.append(message.line), **patient)
        assert (execution.text, seen) == ("42", ["out\n"])
        context = await sandbox.create_code_context(cwd="/tmp", request_timeout=PATIENCE_S)
        assert (await sandbox.run_code("import os\nkept = 1\nos.getcwd()", context=context, **patient)).text == "/tmp"
        assert context.id in [known.id for known in await sandbox.list_code_contexts()]
        await sandbox.restart_code_context(context)
        assert (await sandbox.run_code("kept", context=context, **patient)).error.name == "NameError"
        await sandbox.remove_code_context(context)
        with pytest.raises(NotFoundException):
            await sandbox.run_code("1", context=context, **patient)

    asyncio.run(story())
