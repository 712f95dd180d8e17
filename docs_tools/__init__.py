"""Makes the documentation site's reference pages from the code. Not part of the package."""
