"""An agent of LangGraph: plans with one prompt, answers with another. It knows nothing of compound."""

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

model = ChatOpenAI(model="gpt-4o-mini", temperature=0)


def plan(state: MessagesState) -> dict[str, list[object]]:
    """Note what the question asks for."""
    instruction = SystemMessage(
        "You are a planner. Say in one sentence what the question asks for."
    )
    return {"messages": [model.invoke([instruction, *state["messages"]])]}


def respond(state: MessagesState) -> dict[str, list[object]]:
    """Answer the question, given the note."""
    instruction = SystemMessage("You are a geographer. Answer the question.")
    question, note = state["messages"][0], state["messages"][-1]
    request = HumanMessage(f"Question: {question.content}\nNote: {note.content}")
    return {"messages": [model.invoke([instruction, request])]}


builder = StateGraph(MessagesState)
builder.add_node(plan)
builder.add_node(respond)
builder.add_edge(START, "plan")
builder.add_edge("plan", "respond")
builder.add_edge("respond", END)
graph = builder.compile()


def answer(question: str) -> str:
    """Return the answer to a question."""
    result = graph.invoke({"messages": [HumanMessage(question)]})
    return str(result["messages"][-1].content)
