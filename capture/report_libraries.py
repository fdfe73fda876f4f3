"""Whether the plotting libraries of the reports are there.

Owns that question and its error. They are an optional extra: a server needs none of them. Data
flow: a command that will draw asks before it measures anything; the drawing modules import the
libraries inside their functions.
"""

from importlib.util import find_spec

LIBRARIES = ("plotly", "matplotlib")
"""What the extra `report` installs."""


class ReportLibraryError(ValueError):
    """A report was asked for and a plotting library is not installed."""


def require_report_libraries() -> None:
    """Raise ReportLibraryError, which names the extra, where a library is missing.

    Looks for the libraries without importing them.
    """
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise ReportLibraryError(
            f"a report needs {' and '.join(missing)}, which this Python does not have; "
            "install them with: pip install 'decodegrid[report]'"
        )
