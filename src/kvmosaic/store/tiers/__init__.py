"""The places entries live."""
