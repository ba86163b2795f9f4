// CartPole-v1 with the physics, thresholds and time limit of Gymnasium (Euler's method, 50 steps a
// second). Only its random numbers differ: a seed gives other first states than in Gymnasium.

import { createHash, randomBytes } from 'node:crypto';
import { box, discrete } from './spaces.js';

const GRAVITY = 9.8;
const CART_MASS = 1;
const POLE_MASS = 0.1;
const TOTAL_MASS = CART_MASS + POLE_MASS;
const HALF_LENGTH = 0.5; // of the pole
const FORCE = 10;
const STEP_S = 0.02;
const MAX_POSITION = 2.4;
const MAX_ANGLE = (12 * 2 * Math.PI) / 360;
const MAX_STEPS = 500;
const BOUNDS = [MAX_POSITION * 2, Infinity, MAX_ANGLE * 2, Infinity];

export default class CartPole {
  static id = 'CartPole-v1';
  static actionSpace = discrete(2); // push to the left, to the right
  static observationSpace = box(BOUNDS.map((bound) => -bound), BOUNDS, [4]);
  static renderMode = '';
  static metadata = {};

  #state; // position, velocity, angle, angular velocity
  #steps;

  // `low` and `high` bound the first state, as Gymnasium's options do.
  reset(seed, { low = -0.05, high = 0.05 } = {}) {
    const source = String(seed ?? randomBytes(8).toString('hex'));
    const hash = createHash('sha256').update(source).digest();
    const draw = (_, i) => low + ((high - low) * hash.readUInt32LE(4 * i)) / 2 ** 32;
    this.#state = Array.from({ length: 4 }, draw);
    this.#steps = 0;
    return { observation: this.#state, info: {} };
  }

  step(action) {
    const [position, velocity, angle, spin] = this.#state;
    const [sine, cosine] = [Math.sin(angle), Math.cos(angle)];
    const force = action === 1 ? FORCE : -FORCE;
    const pushed = (force + POLE_MASS * HALF_LENGTH * spin ** 2 * sine) / TOTAL_MASS;
    const inertia = HALF_LENGTH * (4 / 3 - (POLE_MASS * cosine ** 2) / TOTAL_MASS);
    const turning = (GRAVITY * sine - cosine * pushed) / inertia;
    const moving = pushed - (POLE_MASS * HALF_LENGTH * turning * cosine) / TOTAL_MASS;
    this.#state = [
      position + STEP_S * velocity,
      velocity + STEP_S * moving,
      angle + STEP_S * spin,
      spin + STEP_S * turning,
    ];
    this.#steps += 1;
    return {
      observation: this.#state,
      reward: 1,
      terminated: Math.abs(this.#state[0]) > MAX_POSITION || Math.abs(this.#state[2]) > MAX_ANGLE,
      truncated: this.#steps >= MAX_STEPS,
      info: {},
    };
  }
}
