"""An agent of the OpenAI Agents SDK, which calls the Responses API. It knows nothing of compound."""

from agents import Agent, Runner, set_tracing_disabled

set_tracing_disabled(True)
geographer = Agent(
    name="Geographer",
    instructions="You are a geographer. Answer the question.",
    model="gpt-4o-mini",
)


async def answer(question: str) -> str:
    """Return the answer to a question."""
    result = await Runner.run(geographer, question)
    return str(result.final_output)
