"""Errors that users can see. Each message is one line: the problem, then the remedy."""


class KvmosaicError(Exception):
    """Base class of all errors that this package raises deliberately."""


class ConfigError(KvmosaicError, ValueError):
    """A setting is wrong."""


class PromptError(KvmosaicError, ValueError):
    """A prompt cannot be served as given."""


class UnsupportedModelError(KvmosaicError):
    """The chunk cache cannot work with this model; the message says why."""
