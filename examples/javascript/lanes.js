// The environments of one session, in a thread of their own: a deadline holds however long
// they compute, and a result that comes too late is dropped.

import { parentPort, Worker, workerData } from 'node:worker_threads';

const LONGEST_TIMER_MS = 2 ** 31 - 1;

// Why a request cannot be satisfied; `kind` is one of the FAILURES in session.js.
export class Failure extends Error {
  name = 'Failure';

  constructor(kind, text, debugInfo = '') {
    super(text);
    Object.assign(this, { kind, debugInfo });
  }
}

export class Lanes {
  #options;
  #worker;
  #settle = () => {};

  // `module`: URL of a file whose default export is the environment's class.
  constructor(module, numLanes) {
    this.#options = { workerData: { module, numLanes } };
    this.#start();
  }

  // Runs one of the commands below, one at a time.
  async call(name, args, timeoutMs) {
    if (!this.#worker) {
      if (name !== 'reset') throw new Failure('CRASHED', 'the environments are gone; send Reset');
      this.#start();
    }
    let timer;
    const { failure, result } = await new Promise((resolve) => {
      this.#settle = resolve;
      this.#worker.postMessage({ name, args });
      const giveUp = () => this.stop('TIMEOUT', `no result within ${timeoutMs} ms`);
      if (timeoutMs > 0) timer = setTimeout(giveUp, Math.min(timeoutMs, LONGEST_TIMER_MS));
    });
    clearTimeout(timer);
    if (failure) throw new Failure(...failure);
    return result;
  }

  stop(...failure) {
    this.#worker?.terminate();
    this.#worker = undefined;
    this.#settle({ failure });
  }

  #start() {
    const worker = new Worker(new URL(import.meta.url), this.#options);
    const crash = (...why) => worker === this.#worker && this.stop('CRASHED', ...why);
    worker.on('message', (reply) => worker === this.#worker && this.#settle(reply));
    worker.on('error', ({ message, stack }) => crash(`the thread crashed: ${message}`, stack));
    worker.on('exit', (code) => crash(`the thread ended with code ${code}`));
    this.#worker = worker;
  }
}

// --- in the thread -------------------------------------------------------------------------

async function serve({ module, numLanes }) {
  const { default: Environment } = await import(module);
  const envs = Array.from({ length: numLanes }, () => new Environment());
  const hasEnded = envs.map(() => false);

  const reset = async (lane, seed, options) => {
    hasEnded[lane] = false;
    const first = await envs[lane].reset(seed, options);
    return { reward: 0, terminated: false, truncated: false, ...first };
  };
  const step = async (lane, action) => {
    if (hasEnded[lane]) return reset(lane, null, {}); // autoreset mode NEXT_STEP
    const next = await envs[lane].step(action);
    hasEnded[lane] = next.terminated || next.truncated;
    return next;
  };
  const inOrder = async (items, run) => {
    const results = [];
    for (const [i, item] of items.entries()) results.push(await run(item, i));
    return results;
  };
  const commands = {
    reset: ({ lanes, seeds, options }) =>
      inOrder(lanes, (lane, i) => reset(lane, seeds[i] ?? null, options)),
    step: ({ actions }) => inOrder(actions, (action, lane) => step(lane, action)),
    render: () => inOrder(envs, (env) => env.render()),
  };
  parentPort.on('message', async ({ name, args }) => {
    try {
      parentPort.postMessage({ result: await commands[name](args) });
    } catch (error) {
      parentPort.postMessage({ failure: ['RAISED', String(error), String(error?.stack)] });
    }
  });
}

if (workerData?.numLanes) await serve(workerData);
