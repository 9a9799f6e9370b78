"""See the package."""


class TCPStore:
    """Listens to nobody."""

    def __init__(self, host: str, port: int, **options: object) -> None:
        pass
