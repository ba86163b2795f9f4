// One env stream: what may happen when, and the accounts of episodes.

import { randomUUID } from 'node:crypto';
import { conform, packBatch, unpackBatch } from './conformance.js';
import { Failure } from './lanes.js';
import { encodePng } from './png.js';
import { ConformanceError } from './spaces.js';
import { fromMetaMap, message, pack, toInteger, toMetaMap } from './wire.js';

const JoinRequest = message('env.v1.JoinRequest');
const JoinResponse = message('env.v1.JoinResponse');
const WARNING_KEY = 'rlmesh.conformance.warning';

// What each state allows. What is missing is refused as `else` says.
const STATES = {
  AWAIT_RESET: { allows: ['reset', 'render', 'close'], else: ['TOO_EARLY', 'send Reset first'] },
  READY: { allows: ['reset', 'step', 'render', 'close'] },
  ABANDONED: { allows: ['close'], else: ['TOO_LATE', 'an error has ended the session'] },
};

// The code that answers a failure, and the state after it. A new state cuts the episodes off.
const FAILURES = {
  BAD_REQUEST: ['INVALID_ACTION'],
  TOO_EARLY: ['NOT_READY'],
  TOO_LATE: ['CLOSED'],
  TIMEOUT: ['TIMEOUT', 'AWAIT_RESET'],
  CRASHED: ['CRASHED', 'AWAIT_RESET'],
  RAISED: ['INTERNAL', 'AWAIT_RESET'],
  BAD_ACTION: ['INVALID_ACTION', 'ABANDONED'],
  BAD_OBSERVATION: ['INTERNAL', 'ABANDONED'],
};

export class Session {
  isClosed = false;
  #state = 'AWAIT_RESET';
  #observations = []; // by lane: the last one; none before the first Reset
  #episodes = []; // by lane; undefined where none is tracked
  #warned = new Set();

  // `env`: actionSpace, observationSpace and renderMode; `policy`: warn, strict or off.
  constructor(env, lanes, numLanes, policy) {
    Object.assign(this, { env, lanes, numLanes, policy, all: [...Array(numLanes).keys()] });
  }

  // The response to a frame, valid or not. Wait for it before the next frame.
  async answer(frame) {
    let requestId = '';
    try {
      const request = attempt('BAD_REQUEST', Error, () => JoinRequest.decode(frame));
      requestId = request.request_id;
      return pack(JoinResponse, { request_id: requestId, ...(await this.#serve(request)) });
    } catch (error) {
      return pack(JoinResponse, { request_id: requestId, error: this.#fail(error) });
    }
  }

  async #serve({ kind, [kind]: body }) {
    if (!kind) throw new Failure('BAD_REQUEST', 'the frame holds no kind of request known here');
    const { allows, else: refusal } = STATES[this.#state];
    if (!allows.includes(kind)) throw new Failure(refusal[0], `no ${kind} now: ${refusal[1]}`);
    if (kind === 'reset') return { reset: await this.#reset(body) };
    if (kind === 'step') return { step: await this.#step(body) };
    if (kind === 'render') return { render: await this.#render(body) };
    this.isClosed = true;
    return { close: { final_episodes: this.#cutOff() } };
  }

  async #reset({ seeds, options, timeout_ms: timeoutMs, env_indices: chosen }) {
    const lanes = chosen.length ? chosen : this.all;
    const demand = (isMet, text) => {
      if (!isMet) throw new Failure('BAD_REQUEST', `Reset: ${text}`);
    };
    demand(lanes.every((lane) => this.all.includes(lane)), `lanes are 0 to ${this.numLanes - 1}`);
    demand(new Set(lanes).size === lanes.length, 'a lane is named twice');
    const isWhole = lanes.length === this.numLanes;
    demand(isWhole || this.#state === 'READY', 'all lanes must begin first');
    demand([0, lanes.length].includes(seeds.length), `seeds must be none or ${lanes.length}`);

    const args = { lanes, seeds: seeds.map(toInteger), options: fromMetaMap(options) };
    const results = await this.lanes.call('reset', args, Number(timeoutMs));
    const warnings = [];
    this.#observe(lanes, results, warnings);
    lanes.forEach((lane, i) => {
      const seed = seeds.length ? { seed: seeds[i] } : {};
      this.#episodes[lane] = { id: randomUUID(), seed, start: Date.now(), steps: 0, reward: 0 };
    });
    this.#state = 'READY';
    return this.#reported(lanes, results, warnings);
  }

  async #step({ action, timeout_ms: timeoutMs, env_indices: chosen }) {
    if (chosen.length) throw new Failure('BAD_REQUEST', 'Step.env_indices is reserved');
    const { actionSpace } = this.env;
    const warnings = [];
    const bytes = action?.bytes?.data ?? Buffer.alloc(0);
    const actions = attempt('BAD_ACTION', ConformanceError, () =>
      unpackBatch(actionSpace, bytes, this.numLanes, 'action').map((value) =>
        conform(actionSpace, value, 'action', this.#reporter(warnings))));
    const results = await this.lanes.call('step', { actions }, Number(timeoutMs));
    this.#observe(this.all, results, warnings);
    const completed = this.all.filter((lane) => this.#accrue(lane, results[lane]));
    const records = completed.map((lane) => this.#end(lane, results[lane]));
    return {
      ...this.#reported(this.all, results, warnings),
      rewards: results.map(({ reward }) => reward),
      terminated_mask: Buffer.from(results.map(({ terminated }) => Number(terminated))),
      truncated_mask: Buffer.from(results.map(({ truncated }) => Number(truncated))),
      completed_episodes: records,
    };
  }

  async #render({ timeout_ms: timeoutMs }) {
    if (this.env.renderMode !== 'rgb_array' || !this.#observations.length) return {};
    return { png_frame: encodePng(await this.lanes.call('render', null, Number(timeoutMs))) };
  }

  #fail(error) {
    const { kind = 'RAISED', debugInfo = error.stack } = error; // other errors: this server's own
    const [code, state] = FAILURES[kind];
    this.#state = state ?? this.#state;
    return {
      code: `ENV_ERROR_CODE_${code}`,
      message: error.message.toWellFormed(),
      is_recoverable: this.#state !== 'ABANDONED',
      debug_info: debugInfo.toWellFormed(),
      interrupted_episodes: state ? this.#cutOff() : [],
    };
  }

  // --- values ------------------------------------------------------------------------------

  #observe(lanes, results, warnings) {
    const { observationSpace } = this.env;
    const values = attempt('BAD_OBSERVATION', ConformanceError, () => results.map((result) =>
      conform(observationSpace, result.observation, 'observation', this.#reporter(warnings))));
    lanes.forEach((lane, i) => { this.#observations[lane] = values[i]; });
  }

  #reporter(warnings) {
    return (kind, path, found) => {
      if (this.policy === 'strict') throw new ConformanceError(`${path}: ${found}`);
      if (this.policy === 'warn') warnings.push([`${kind} ${path}`, `${path}: ${found}`]);
    };
  }

  // What the answers to Reset and to Step share.
  #reported(lanes, results, warnings) {
    const infos = vectorInfos(this.all.map((lane) => results[lanes.indexOf(lane)]?.info));
    const news = warnings.filter(([key]) => !this.#warned.has(key) && this.#warned.add(key));
    if (news.length) infos[WARNING_KEY] = news.map(([, text]) => text);
    return {
      observation: { bytes: { data: packBatch(this.env.observationSpace, this.#observations) } },
      infos: toMetaMap(infos),
      episode_ids: this.all.map((lane) => this.#episodes[lane]?.id ?? ''),
    };
  }

  // --- episodes: tracked from a Reset to the first end; what an autoreset starts is not ------

  // Adds a step to a lane's episode; returns whether it ended with it.
  #accrue(lane, { reward, terminated, truncated }) {
    const episode = this.#episodes[lane];
    if (!episode) return false;
    episode.steps += 1;
    episode.reward += reward;
    return terminated || truncated;
  }

  #end(lane, { terminated = false, truncated = false, info = {} }) {
    const { id, seed, start, steps, reward } = this.#episodes[lane];
    const end = Date.now();
    delete this.#episodes[lane];
    return {
      episode_id: id,
      ...seed,
      env_index: lane,
      step_count: steps,
      cumulative_reward: reward,
      terminated,
      truncated,
      start_timestamp_ns: `${start}000000`,
      end_timestamp_ns: `${end}000000`,
      duration_ms: end - start,
      final_info: toMetaMap(info),
    };
  }

  #cutOff() {
    return this.all.filter((lane) => this.#episodes[lane]).map((lane) => this.#end(lane, {}));
  }
}

// Runs a function; an error of a type becomes a Failure of a kind.
function attempt(kind, type, run) {
  try {
    return run();
  } catch (error) {
    throw error instanceof type ? new Failure(kind, error.message) : error;
  }
}

// Infos of each lane (or undefined) as a vector's: a list by key, and by _key which lanes have it.
function vectorInfos(byLane) {
  const vector = {};
  for (const key of new Set(byLane.flatMap((info) => Object.keys(info ?? {})))) {
    const values = byLane.map((info) => info?.[key]);
    const hasIt = values.map((value) => value !== undefined);
    const known = values.filter((_, lane) => hasIt[lane]);
    const blank = { number: 0, boolean: false }[typeof known[0]] ?? null;
    const isNested = known.every((value) => value?.constructor === Object);
    const list = () => values.map((value, lane) => (hasIt[lane] ? value : blank));
    vector[key] = isNested ? vectorInfos(values) : list();
    vector[`_${key}`] = hasIt;
  }
  return vector;
}
