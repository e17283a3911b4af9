"""The HTTP server: what other programs speak to (`pi2 serve`).

A request goes one way: ``*_schema`` checks its body, ``calls`` makes the model's requests of it,
``host`` has them generated, ``answer_reader`` divides the text into reasoning, content and tool
calls as the model's format (``formats/``) has them. ``chat``, ``completions``, ``responses``,
``messages`` and ``ollama`` write them as the clients of each interface expect."""
