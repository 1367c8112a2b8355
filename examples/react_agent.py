"""Think, act, observe, repeat: an agent whose tool is a Python function. The loop is plain Python.

python examples/react_agent.py
"""

from __future__ import annotations

import ast
import operator

from trellis import ProgramState, function, gen, set_default_backend

EXAMPLES = """\
Question: A box holds 6 eggs. How many eggs do 5 boxes hold?
Thought: I multiply 5 by 6.
Action: Calculate
Input: 5 * 6
Observation: 30
Thought: I know the answer now.
Action: Finish
Answer: 30

Question: Tom has 31 marbles and loses 14. How many are left?
Thought: I subtract 14 from 31.
Action: Calculate
Input: 31 - 14
Observation: 17
Thought: I know the answer now.
Action: Finish
Answer: 17

"""
# The line end belongs to the pattern: so the model says itself where a number ends.
SUM = r"[1-9][0-9]{0,2} [-+*] [1-9][0-9]{0,2}\n"
NUMBER = r"-?[0-9]{1,6}\n"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> int:
    """The tool: + - * on whole numbers."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            result: int = OPERATORS[type(node.op)](value(node.left), value(node.right))
            return result
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(f"cannot calculate {expression!r}")

    return value(ast.parse(expression.strip(), mode="eval").body)


@function
def agent(s: ProgramState, question: str, max_steps: int = 3) -> str:
    s += EXAMPLES + f"Question: {question}\n"
    for _ in range(max_steps):
        s += "Thought:" + gen("thought", max_tokens=40, stop="\n") + "\n"
        s += "Action: " + gen("action", choices=["Calculate", "Finish"]) + "\n"
        if s["action"] == "Finish":
            break
        s += "Input: " + gen("input", regex=SUM, max_tokens=24)
        s += f"Observation: {calculate(s['input'])}\n"
    s += "Answer: " + gen("answer", regex=NUMBER, max_tokens=12)
    answer: str = s["answer"]
    return answer.strip()


def main() -> ProgramState:
    state = agent.run("A train has 12 wagons with 48 seats each. How many seats does it have?", temperature=0)
    print(state.text().removeprefix(EXAMPLES))
    print(f"answer: {state.return_value}")
    return state


if __name__ == "__main__":
    from common import choose_backend

    with choose_backend() as backend:
        set_default_backend(backend)
        main()
