"""Who may do what, and how much of it at once."""

from lorikeet.tenancy.admission import Admission
from lorikeet.tenancy.authentication import Principal, authenticate

__all__ = ["Admission", "Principal", "authenticate"]
