"""The language server: `server` speaks the protocol, the other modules work on texts."""
