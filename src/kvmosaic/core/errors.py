"""Errors a user can meet. Each message is one line: what is wrong, then what to do."""


class KvmosaicError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KvmosaicError, ValueError):
    """A setting is wrong."""


class PromptError(KvmosaicError, ValueError):
    """A prompt cannot be served as given."""


class UnsupportedModelError(KvmosaicError):
    """The chunk cache cannot work with this model; the message says why."""
