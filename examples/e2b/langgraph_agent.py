"""An agent made with LangGraph whose tools are a sandbox's. Its model is a script of answers: put a real one in its place."""

from e2b_code_interpreter import Sandbox
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def tools_of(sandbox):
    @tool
    def python(code: str) -> str:
        """Run Python code. What it defines stays for the next time; the value of its last line is told."""
        execution = sandbox.run_code(code)
        if execution.error:
            return f"{execution.error.name}: {execution.error.value}"
        return "".join(execution.logs.stdout) + (execution.text or "")

    @tool
    def shell(command: str) -> str:
        """Run a command with the shell."""
        return sandbox.commands.run(command).stdout.strip()

    return [python, shell]


class Scripted(BaseChatModel):
    """Asks for tools, one step after the other, and makes its last answer of what they told."""

    steps: list[list[tuple[str, dict[str, str]]]]
    tools: list[str] = []

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **options):
        return self.model_copy(update={"tools": [tool.name for tool in tools]})

    def _generate(self, messages, stop=None, run_manager=None, **options):
        told = {message.tool_call_id: message.content for message in messages if isinstance(message, ToolMessage)}
        taken = sum(isinstance(message, AIMessage) for message in messages)
        if taken == len(self.steps):
            assert told["1-0"].startswith("FileNotFoundError"), told
            answer = AIMessage(f"The table has {told['2-1']} lines; its numbers add up to {told['2-0']}.")
        else:
            calls = [
                {"name": name, "args": arguments, "id": f"{taken}-{index}"}
                for index, (name, arguments) in enumerate(self.steps[taken])
                if name in self.tools
            ]
            answer = AIMessage("", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=answer)])


STEPS = [
    [("shell", {"command": "printf '1,2\\n3,4\\n5,6\\n' > table.csv"})],
    # A mistake, seen in what the tool tells and mended in the next step.
    [("python", {"code": "import pandas as pd\ntable = pd.read_csv('tabel.csv', header=None)"})],
    # Two at once.
    [
        ("python", {"code": "table = pd.read_csv('table.csv', header=None)\nint(table.to_numpy().sum())"}),
        ("shell", {"command": "wc -l < table.csv"}),
    ],
]


def agent(model, tools):
    model = model.bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


with Sandbox.create() as sandbox:
    question = HumanMessage("How long is the table, and what is its sum?")
    ended = agent(Scripted(steps=STEPS), tools_of(sandbox)).invoke({"messages": [question]})
    print(ended["messages"][-1].content)
