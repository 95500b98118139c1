// Puts the page together.

import { chatRequest, mountChat } from "./chat.js";
import { mountCode } from "./code.js";
import { completionRequest, mountCompletion } from "./completion.js";
import { mountEditors } from "./editors.js";
import { mountKey } from "./key.js";
import { onModelsChange, startMetrics } from "./metrics.js";
import { loadModels, mountModels } from "./models.js";
import { mountSampling } from "./sampling.js";
import { mountScoring, scoringRequest } from "./scoring.js";
import { currentTab, mountTabs, showTab } from "./tabs.js";

const REQUESTS = { chat: chatRequest, completion: completionRequest, scoring: scoringRequest };

async function connect() {
  await loadModels(); // asks for the key where one is needed
  startMetrics();
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
connect();
