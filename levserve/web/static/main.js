// Puts the page together.

import { chatRequest, mountChat } from "./chat.js";
import { mountCode } from "./code.js";
import { completionRequest, mountCompletion } from "./completion.js";
import { mountEditors } from "./editors.js";
import { mountKey } from "./key.js";
import { onModelsChange, startMetrics } from "./metrics.js";
import { loadModels, mountModels, onModelNeeded } from "./models.js";
import { mountSampling } from "./sampling.js";
import { mountScoring, scoringRequest } from "./scoring.js";
import { currentTab, mountTabs, showTab } from "./tabs.js";

const REQUESTS = { chat: chatRequest, completion: completionRequest, scoring: scoringRequest };

let connecting = null;

/** Reads the models and starts the metrics, also again after a change of the key. */
function connect() {
  connecting ??= (async () => {
    await loadModels(); // asks for the key where one is needed
    startMetrics();
  })().finally(() => (connecting = null));
}

mountTabs();
mountModels();
mountSampling();
mountEditors();
mountChat(showTab);
mountCompletion();
mountScoring();
mountCode(() => REQUESTS[currentTab()]());
mountKey(connect);
onModelsChange(loadModels);
onModelNeeded(connect);
connect();
