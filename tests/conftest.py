"""Names of tests: the same in every process that collects them."""


def pytest_make_parametrize_id(config, val, argname):
    """Bytes name no test: a compressor's differ by version and second, and workers must collect the same tests."""
    return argname if isinstance(val, bytes) else None
