// The probe: an environment that shows on demand what the edition is about, as
// rlmesh_ray/compliance/probe.py describes it. Replace it by your own simulator: a module whose
// default export is a class like this one. reset, step and render may be async.

import { createHash, randomBytes } from 'node:crypto';
import { box, dict, discrete, multiBinary, multiDiscrete, text, tuple } from './spaces.js';

const COMMANDS = [
  'GO_ON', 'TERMINATE', 'TRUNCATE', 'FAIL', 'SLEEP', 'OBSERVE_NAN', 'OBSERVE_OUT_OF_RANGE',
  'OBSERVE_WRONG_SHAPE', 'OBSERVE_MISSING_KEY', 'OBSERVE_INTEGRAL_FLOAT', 'OBSERVE_FRACTION',
  'OBSERVE_DOUBLE', 'OBSERVE_TOO_LARGE',
];
const SLEEP_MS = 1500;
const ECHOED = {
  box: box(-1, 1, [2]),
  ray: box([0, -Infinity], [Infinity, 0], [2]),
  bits: multiBinary(3),
  choices: multiDiscrete([2, 3]),
  text: text(1, 4, 'abc'),
  pair: tuple(discrete(2), discrete(3, -1)),
};
const ZEROS = [0, 0];
const REST = { box: ZEROS, ray: ZEROS, bits: [0, 0, 0], choices: ZEROS, text: 'a', pair: ZEROS };

export default class ProbeEnv {
  static id = 'RLMeshProbe-v0';
  static actionSpace = dict({ command: discrete(COMMANDS.length), ...ECHOED });
  static observationSpace = dict({
    steps: box(0, 10_000, [1], 'int32'),
    noise: box(0, 1, [2]),
    echo: dict(ECHOED),
  });
  static renderMode = 'rgb_array'; // or '': no frames
  static metadata = { render_modes: ['rgb_array'], render_fps: 30, 'rlmesh_ray.probe': 1 };

  #seed;
  #steps = 0;

  // `seed`: a number, a BigInt beyond 2 ** 53, or null; `options`: an object.
  reset(seed, options) {
    this.#seed = seed ?? randomBytes(8).toString('hex');
    this.#steps = 0;
    return this.#obey(Number(options.command ?? 0), REST);
  }

  step({ command, ...echo }) {
    this.#steps += 1;
    return {
      ...this.#obey(command, echo),
      reward: Number.isFinite(echo.box[0]) ? echo.box[0] : 0,
      terminated: COMMANDS[command] === 'TERMINATE',
      truncated: COMMANDS[command] === 'TRUNCATE',
    };
  }

  render() {
    return { width: 4, height: 4, data: Buffer.alloc(4 * 4 * 3, this.#steps % 256) };
  }

  #obey(command, echo) {
    const name = COMMANDS[command];
    if (name === 'FAIL') throw new Error('the probe was told to fail');
    if (name === 'SLEEP') Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, SLEEP_MS);
    const observation = { steps: [this.#steps], noise: this.#noise(), echo };
    Object.assign(observation, this.#deviation(name));
    return { observation, info: { steps: this.#steps, command } };
  }

  #noise() {
    const hash = createHash('sha256').update(`${this.#seed} ${this.#steps}`).digest();
    return [hash.readUInt32LE(0) / 2 ** 32, hash.readUInt32LE(4) / 2 ** 32];
  }

  #deviation(name) {
    return {
      OBSERVE_NAN: { noise: [NaN, 2] },
      OBSERVE_OUT_OF_RANGE: { noise: [2, 0.5] },
      OBSERVE_WRONG_SHAPE: { noise: [0, 0, 0] },
      OBSERVE_MISSING_KEY: { noise: undefined },
      OBSERVE_INTEGRAL_FLOAT: { steps: Float64Array.of(this.#steps) },
      OBSERVE_FRACTION: { steps: [0.5] },
      OBSERVE_TOO_LARGE: { steps: [2 ** 40] },
      OBSERVE_DOUBLE: { noise: Float64Array.of(0.25, 0.1) },
    }[name];
  }
}
