"""Raises at import.

Rejected: raised NameError: name 'undefined_name' is not defined at import
"""

undefined_name  # noqa: B018, F821
