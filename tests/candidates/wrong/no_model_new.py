"""Has no ModelNew.

Rejected: has no attribute 'ModelNew' at import
"""
