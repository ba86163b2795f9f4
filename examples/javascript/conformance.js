// Values to the wire and back, checked as "Value Conformance" says.

import os from 'node:os';
import { ARRAYS, bytesOf, ConformanceError, mapValues, toElement } from './spaces.js';
import { message, pack } from './wire.js';

if (os.endianness() !== 'LE') throw new Error('the wire is little endian, this machine is not');

const ValueList = message('spaces.v1.ValueList');

// Checks a value of one lane; returns it at the declared dtypes. report(kind, path, found) hears
// of range deviations.
export function conform(space, value, path, report) {
  switch (space.field) {
    case 'dict':
      return mapValues(space.parts, (part, key) => {
        if (value?.[key] === undefined) throw misfit(path, `has no key ${key}`);
        return conform(part, value[key], `${path}.${key}`, report);
      });
    case 'tuple':
      if (!Array.isArray(value) || value.length !== space.parts.length) {
        throw misfit(path, `is no array of ${space.parts.length} parts`);
      }
      return space.parts.map((part, i) => conform(part, value[i], `${path}.${i}`, report));
    case 'text':
      return conformText(space, value, path, report);
    case 'discrete':
      return Number(conformArray(space, [value], path, report)[0]);
    default:
      return conformArray(space, value, path, report);
  }
}

function conformArray({ dtype, size, low, high, isDomain }, value, path, report) {
  if (value?.length !== size) throw misfit(path, `has ${value?.length} elements, not ${size}`);
  const array = ARRAYS[dtype].from(value, (element) => toElement(dtype, element, path));
  if (array.some(Number.isNaN)) throw misfit(path, 'is NaN');
  const at = array.findIndex((element, i) => element < low[i] || element > high[i]);
  if (at >= 0) {
    const found = `${array[at]} is not in [${low[at]}, ${high[at]}] (element ${at})`;
    if (isDomain) throw misfit(path, found);
    report('range', path, found);
  }
  return array;
}

function conformText({ min, max, charset }, value, path, report) {
  if (typeof value !== 'string' || !value.isWellFormed()) throw misfit(path, 'is no text');
  const characters = [...value]; // code points, not UTF-16 units
  const { length } = characters;
  if (length < min || length > max) report('length', path, `has ${length} characters`);
  const stranger = charset.size > 0 && characters.find((character) => !charset.has(character));
  if (stranger) report('charset', path, `${stranger} is not in the charset`);
  return value;
}

const misfit = (path, reason) => new ConformanceError(`${path}: ${reason}`);

// --- the wire ------------------------------------------------------------------------------

// Conforming values, one a lane, to the bytes of a SpaceValue: raw if the root is an array.
export function packBatch(space, values) {
  const nodes = values.map((value) => toNode(space, value));
  if (!space.dtype) return pack(ValueList, { items: nodes });
  if (space.field === 'discrete') return Buffer.from(BigInt64Array.from(values, BigInt).buffer);
  return Buffer.concat(nodes.map((node) => node[space.field]));
}

// The bytes of a SpaceValue to one value a lane, still to be conformed.
export function unpackBatch(space, bytes, numLanes, path) {
  let nodes;
  try {
    nodes = space.dtype ? split(space, bytes) : ValueList.decode(bytes).items;
  } catch (error) {
    throw misfit(path, `does not decode: ${error.message}`);
  }
  if (nodes.length !== numLanes) throw misfit(path, `has ${nodes.length} lanes, not ${numLanes}`);
  return nodes.map((node) => fromNode(space, node, path));
}

function split({ field, size, dtype }, bytes) {
  const width = size * ARRAYS[dtype].BYTES_PER_ELEMENT;
  if (bytes.length % width) throw new Error(`${bytes.length} bytes, a lane has ${width}`);
  return Array.from({ length: bytes.length / width }, (_, lane) => {
    const own = bytes.subarray(lane * width, (lane + 1) * width);
    return { kind: field, [field]: field === 'discrete' ? own.readBigInt64LE() : own };
  });
}

function toNode({ field, parts }, value) {
  switch (field) {
    case 'dict':
      return { dict: { entries: mapValues(parts, (part, key) => toNode(part, value[key])) } };
    case 'tuple':
      return { tuple: { items: parts.map((part, i) => toNode(part, value[i])) } };
    default:
      return { [field]: ArrayBuffer.isView(value) ? bytesOf(value) : value };
  }
}

function fromNode({ field, parts, dtype }, node, path) {
  const { kind = 'empty', [field]: value } = node;
  if (kind !== field) throw misfit(path, `is ${kind}, not ${field}`);
  const enter = (part, own, key) => part && own && fromNode(part, own, `${path}.${key}`);
  switch (field) {
    case 'dict':
      return mapValues(parts, (part, key) => enter(part, value.entries[key], key));
    case 'tuple':
      return value.items.map((item, i) => enter(parts[i], item, i));
    case 'text':
      return value;
    case 'discrete':
      return BigInt(String(value));
    default:
      if (value.length % ARRAYS[dtype].BYTES_PER_ELEMENT) throw misfit(path, 'has half an element');
      return new ARRAYS[dtype](new Uint8Array(value).buffer); // a copy: a view must be aligned
  }
}
