// A Slipstream client in Node.js: a streamed chat, cancelling, and what to do about errors.
//
//   node client.js chat "Why is the sky blue?"
//   node client.js chat                          a conversation, one line a turn
//   node client.js cancel
//   node client.js errors

import { randomUUID } from "node:crypto";
import { createInterface } from "node:readline/promises";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";

import { credentials, status } from "@grpc/grpc-js";

import { describe, retryDelay } from "./errors.js";
import { FinishReason, Inference } from "./generated/slipstream/v1/inference_pb.js";
import { connect } from "./grpc-client.js";

const ATTEMPTS = 30;

async function main() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      target: { type: "string", default: "localhost:50051" },
      "max-tokens": { type: "string", default: "256" },
    },
  });
  const [command, prompt] = positionals;
  const commands = {
    chat: (inference) => chat(inference, prompt, Number(values["max-tokens"])),
    cancel: async (inference) => {
      await cancel(inference);
      await abortById(inference);
    },
    errors,
  };
  if (!(command in commands)) {
    console.error("usage: node client.js [--target host:port] [--max-tokens n] chat [prompt] | cancel | errors");
    process.exit(2);
  }
  // One client serves any number of calls at once; open it once, not per call.
  const inference = connect(Inference, values.target, credentials.createInsecure());
  try {
    await commands[command](inference);
  } catch (error) {
    if (error.code === undefined) throw error;
    console.error(describe(error));
    process.exitCode = 1;
  } finally {
    inference.close();
  }
}

// ---- a streamed chat

/** One question, or a conversation that keeps its history, until the input ends. */
async function chat(inference, prompt, maxTokens) {
  const messages = [];
  for await (const line of prompt === undefined ? questions() : [prompt]) {
    messages.push({ role: "user", content: line });
    const request = {
      prompt: { case: "chat", value: { messages } },
      // Fields left out take the model's own defaults; a field set to 0 means 0.
      sampling: { maxTokens, temperature: 0.2 },
    };
    let answer = "";
    for await (const response of generate(inference, request, 300_000)) {
      answer += response.text;
      process.stdout.write(response.text);
      if (response.finishReason) report(response);
    }
    messages.push({ role: "assistant", content: answer });
  }
}

async function* questions() {
  const lines = createInterface({ input: process.stdin, output: process.stderr, prompt: "> " });
  lines.prompt();
  for await (const line of lines) {
    yield line;
    lines.prompt();
  }
}

/** What the last message of a stream says about the whole. */
function report({ finishReason, usage, timings }) {
  const rate = timings.perToken ? (1 / timings.perToken).toFixed(1) : "-";
  console.error(
    `\n[${FinishReason[finishReason]}: ${usage.promptTokens} prompt tokens (${usage.cachedTokens} from cache), ` +
      `${usage.completionTokens} generated, first after ${(timings.firstToken * 1000).toFixed(0)} ms, ` +
      `then ${rate} tokens/s]`,
  );
}

/**
 * A stream that is started again while the server is busy, loading or restarting: only before its first
 * message, since from then on part of the answer has been seen.
 */
async function* generate(inference, request, timeoutMs) {
  for (let attempt = 1; ; attempt += 1) {
    // The deadline travels with the call: once it passes, the server stops working on the request.
    const stream = inference.generate(request, { deadline: Date.now() + timeoutMs });
    let hasBegun = false;
    try {
      for await (const response of stream) {
        hasBegun = true;
        yield response;
      }
      return;
    } catch (error) {
      const delay = retryDelay(error);
      if (hasBegun || delay === undefined || attempt === ATTEMPTS) throw error;
      await sleep(delay);
    } finally {
      // If the caller stops listening early, the server is told at once. No effect on a finished call.
      stream.cancel();
    }
  }
}

// ---- ending a request early

/** The client that reads a stream can end it; all that the request holds on the server is freed. */
async function cancel(inference, afterTokens = 5) {
  const stream = inference.generate(endlessRequest());
  let tokens = 0;
  try {
    for await (const response of stream) {
      tokens += response.tokenIds.length;
      if (tokens >= afterTokens) stream.cancel();
    }
  } catch (error) {
    console.log(`cancelled after ${tokens} tokens: ${status[error.code]}`);
  }
}

/** Anybody who knows a request's id can end it, from another process too. */
async function abortById(inference) {
  const requestId = `example-${randomUUID()}`;
  try {
    for await (const response of inference.generate({ ...endlessRequest(), requestId })) {
      if (response.tokenIds.length > 0) await inference.abort({ requestId });
    }
  } catch (error) {
    console.log(`aborted by id: ${status[error.code]}`);
  }
}

/** Generates until the model's context is full. */
const endlessRequest = () => ({
  prompt: { case: "text", value: "Count: 1, 2, 3," },
  sampling: { ignoreEos: true },
});

// ---- errors

/** Calls that go wrong, and what the client learns of each. */
async function errors(inference) {
  const text = { case: "text", value: "Hi" };
  const trials = {
    "fields out of range": [{ prompt: text, sampling: { temperature: -1, topP: 3 } }],
    "another model's name": [{ prompt: text, model: "no-such-model" }],
    "too little time": [endlessRequest(), 50],
  };
  for (const [name, [request, timeoutMs]] of Object.entries(trials)) {
    try {
      await inference.complete(request, timeoutMs ? { deadline: Date.now() + timeoutMs } : {});
      console.log(`${name}: answered all the same`);
    } catch (error) {
      console.log(`${name}: ${describe(error)}`);
    }
  }
}

await main();
