'''Messages of several lines: """ opens a block, the next """ at the end of a line closes it.'''

from __future__ import annotations

QUOTES = '"""'


def is_open(text: str) -> bool:
    '''Whether a """ block has begun and is not closed yet.'''
    body = text.strip()
    return body.startswith(QUOTES) and (len(body) < 2 * len(QUOTES) or not body.endswith(QUOTES))


def unquoted(text: str) -> str:
    '''The message: the inside of a """ block, or the text as it is.'''
    body = text.strip()
    if not body.startswith(QUOTES):
        return body
    body = body.removeprefix(QUOTES)
    return body.removesuffix(QUOTES).strip("\n")
