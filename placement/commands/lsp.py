"""``placement lsp``: the language server, for editors to start."""

from __future__ import annotations

import click


@click.command()
@click.option("--stdio", is_flag=True, help="Talk over stdin and stdout, which it does in any case.")
def lsp(stdio: bool) -> None:
    """Serve an editor: faults, completion, placements under the cursor."""
    del stdio
    try:
        from placement.editor.server import main  # noqa: PLC0415 - no other command needs it
    except ModuleNotFoundError as error:
        if error.name not in ("pygls", "lsprotocol"):
            raise
        raise click.UsageError("the language server needs pygls: pip install 'placement[lsp]'") from error
    main()
