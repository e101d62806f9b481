"""Sessions: models opened once, then one text after another.

    with Session.open(model="demo") as session:
        for step in session.generate("def fibonacci(n):"):
            print(step.text, end="")

`TextSession` is the base class of all sessions, to be used in annotations.
"""

from specexec_cli.session.factory import Session, open_session
from specexec_cli.session.text_session import TextSession

__all__ = ["Session", "TextSession", "open_session"]
