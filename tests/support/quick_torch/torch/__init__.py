"""In the place of torch, for ranks that compute nothing: the little that each rank calls before its first line."""


def set_num_threads(count: int) -> None:
    pass
