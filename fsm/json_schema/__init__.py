"""JSON schema: checked, lowered to what an engine enforces, and validated at the end.

``source`` reads the text; ``document`` follows references; ``normalise`` writes any draft in one form;
``lower`` and the rewrites that it drives spell out what masks cannot enforce; ``emit`` writes the result.
"""

from trellis.fsm.json_schema.prepare import Prepared, prepare

__all__ = ["Prepared", "prepare"]
