"""What an error of somebody else's code says, whatever happens when it is asked."""

_MOST_CHARACTERS = 8192


def text_of(error: BaseException) -> str:
    """Return the text of an error, in at most 8192 characters. Never raises.

    Both ``str(error)`` and an f-string run code of the error's own class.
    """
    try:
        return clipped(str(error), _MOST_CHARACTERS)
    except BaseException:  # noqa: BLE001  # an error about an error is no news
        return "(its __str__ raised an error, too)"


def clipped(text: str, most: int) -> str:
    """Return ``text``, without its middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [...] {text[-half:]}"
