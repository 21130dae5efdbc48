"""Errors that the user can fix: one line, without a traceback, and exit status 2."""


class UserError(ValueError):
    """Something that the user can fix; the message is one line that says what is wrong and what to do."""


class Checked(SystemExit):
    """Ends a script, with exit status 0, whose settings and machine have passed all checks: `--check_only true`."""

    def __init__(self, settings):
        super().__init__(0)
        self.settings = settings
        print(f"{settings.name} can run here")


def first_line(error: BaseException, length: int = 200) -> str:
    """Return the first line of an error's message, cut at `length` characters; of none, the name of its class."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:length]
