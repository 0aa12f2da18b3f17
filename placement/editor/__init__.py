"""Editors: how a ``.plc`` text is coloured, and the language server. Nothing here imports torch but ``worker``.

``words`` → ``tokens`` → ``lexer`` (Pygments) and ``textmate`` (VS Code and others); ``positions``, ``document``,
``completion``, ``navigation`` answer from a text and what is known of its model; ``planner`` asks ``worker``, a
process of its own, about the model; ``server`` speaks the protocol.
"""
