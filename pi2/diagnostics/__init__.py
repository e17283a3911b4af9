"""What a user is told when something is wrong: one type, several renderers."""

from pi2.diagnostics.diagnostic import Diagnostic, Severity, Span, UserError

__all__ = ["Diagnostic", "Severity", "Span", "UserError"]
