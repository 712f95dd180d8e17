"""The ``kvmosaic`` command."""
