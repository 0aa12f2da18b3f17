// Starts `placement lsp` for .plc files; all that it knows is in the server.
const { workspace } = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

async function start() {
  const settings = workspace.getConfiguration("placement");
  const [command, ...args] = settings.get("command");
  client = new LanguageClient(
    "placement",
    "placement",
    { command, args },
    {
      documentSelector: [{ language: "placement" }],
      initializationOptions: settings.get("server"),
    },
  );
  await client.start();
}

exports.activate = async (context) => {
  context.subscriptions.push(
    workspace.onDidChangeConfiguration(async (event) => {
      if (event.affectsConfiguration("placement")) {
        await exports.deactivate();
        await start();
      }
    }),
  );
  await start();
};

exports.deactivate = async () => {
  const running = client;
  client = undefined;
  await running?.stop();
};
