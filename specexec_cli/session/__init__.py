"""Sessions: models opened once, then one text after another.

    with Session.open(pair="demo") as session:
        for step in session.generate("def fibonacci(n):"):
            print(step.text, end="")

`TextSession` is what every session is and the type to name in annotations.
"""

from specexec_cli.session.factory import Session, open_session
from specexec_cli.session.text_session import TextSession

__all__ = ["Session", "TextSession", "open_session"]
