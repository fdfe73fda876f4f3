"""The one error that a request can cause."""


class RequestError(ValueError):
    """A request that cannot be served; says what was given and what is allowed.

    Raised before anything of the request is queued, so no other request notices.
    """
