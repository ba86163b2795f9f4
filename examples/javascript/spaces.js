// Descriptions of spaces.
//
// A value, as an environment takes it: a flat typed array in C order for Box, MultiBinary and
// MultiDiscrete, a number for Discrete, a string, an object for Dict, an array for Tuple. What it
// returns may be plain arrays, too.

export const ARRAYS = {
  bool: Uint8Array, int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array,
  int32: Int32Array, uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array,
  float32: Float32Array, float64: Float64Array,
};

// A structural deviation, or a range deviation under the policy "strict"; in the client also a slot
// that names no lane.
export class ConformanceError extends Error {
  name = 'ConformanceError';
}

export const bytesOf = ({ buffer }) => new Uint8Array(buffer);
const isFloat = (dtype) => dtype.startsWith('float');

export function mapValues(object, change) {
  const changed = Object.entries(object).map(([key, value]) => [key, change(value, key)]);
  return Object.fromEntries(changed);
}

// A number as the elements of a dtype are held; nothing is truncated or wrapped.
export function toElement(dtype, value, path) {
  const element = typeof value === 'boolean' ? Number(value) : value;
  if (isFloat(dtype) && ['number', 'bigint'].includes(typeof element)) return Number(element);
  if (Number.isInteger(element) || typeof element === 'bigint') {
    const held = ARRAYS[dtype].of(dtype.endsWith('64') ? BigInt(element) : Number(element))[0];
    if (held == element) return held; // ==, since 1n is 1
  }
  throw new ConformanceError(`${path}: ${String(element)} cannot be held exactly by ${dtype}`);
}

// A space has its `field` of SpaceValueNode and, for the contract, its `spec`.

// Elements between bounds, each one for all or an array; isDomain: to be outside is structural.
function arraySpace(field, dtype, shape, [low, high], isDomain, toSpec) {
  const size = shape.reduce((product, length) => product * length, 1);
  const spread = (bound) => ARRAYS[dtype].from({ length: size }, (_, i) =>
    toElement(dtype, Array.isArray(bound) ? bound[i] : bound, 'bound'));
  const bounds = { low: spread(low), high: spread(high) };
  const spec = { shape, dtype: `D_TYPE_${dtype.toUpperCase()}`, ...toSpec(bounds) };
  return { field, dtype, size, ...bounds, isDomain, spec };
}

export function box(low, high, shape, dtype = 'float32') {
  return arraySpace('tensor', dtype, shape, [low, high], dtype === 'bool', (bounds) => ({
    box: isFloat(dtype)
      ? { elementwise: mapValues(bounds, (bound) => [...bound]) }
      : { typed_elementwise: mapValues(bounds, bytesOf) },
  }));
}

export function discrete(n, start = 0) {
  const bounds = [start, start + n - 1];
  return arraySpace('discrete', 'int64', [], bounds, true, () => ({ discrete: { n, start } }));
}

export function multiBinary(size) {
  return arraySpace('multi', 'int8', [size], [0, 1], true, () => ({ multi_binary: { size } }));
}

export function multiDiscrete(nvec) {
  const bounds = [0, nvec.map((n) => n - 1)];
  const toSpec = () => ({ multi_discrete: { flat: { data: nvec } } });
  return arraySpace('multi', 'int64', [nvec.length], bounds, true, toSpec);
}

export function text(min, max, charset = '') {
  const spec = { text: { min_length: min, max_length: max, charset } };
  return { field: 'text', min, max, charset: new Set(charset), spec };
}

export function dict(parts) {
  const spaces = Object.values(parts).map(({ spec }) => spec);
  return { field: 'dict', parts, spec: { dict: { keys: Object.keys(parts), spaces } } };
}

export function tuple(...parts) {
  return { field: 'tuple', parts, spec: { tuple: { spaces: parts.map(({ spec }) => spec) } } };
}
