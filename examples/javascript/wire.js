// The messages of rlmesh.protocol.v1, read from proto/ at run time, and free-form values.

import path from 'node:path';
import { fileURLToPath } from 'node:url';
import protobuf from 'protobufjs';
import { mapValues } from './spaces.js';

// The folder proto/ of rlmesh-ray.
const schemas = process.env.RLMESH_RAY_PROTO
  || fileURLToPath(new URL('../../proto', import.meta.url));
const root = new protobuf.Root();
root.resolvePath = (_origin, target) => path.resolve(schemas, target);
const services = ['rlmesh/env/v1/service.proto', 'rlmesh/model/v1/service.proto'];
try {
  root.loadSync(services, { keepCase: true });
} catch (error) {
  const remedy = 'set the variable RLMESH_RAY_PROTO to the folder proto/ of an rlmesh-ray checkout';
  throw new Error(`the schemas are not in ${schemas} (${error.message}); ${remedy}`);
}

export const message = (name) => root.lookupType(`rlmesh.${name}`);
export const pack = (type, fields) => Buffer.from(type.encode(type.fromObject(fields)).finish());

// An object to a MetaMap; what the wire has no form for becomes text.
export const toMetaMap = (object) => ({ entries: mapValues(object, toMeta) });

function toMeta(value) {
  if (value === null || value === undefined) return {};
  if (typeof value === 'boolean') return { bool: value };
  if (Number.isSafeInteger(value)) return { int: value };
  if (typeof value === 'number') return { float: value };
  if (value instanceof Uint8Array) return { bytes: value };
  if (typeof value !== 'object') return { str: String(value).toWellFormed() };
  if (Symbol.iterator in value) return { list: { items: Array.from(value, toMeta) } };
  return { map: toMetaMap(value) };
}

// A decoded MetaMap to an object.
export const fromMetaMap = (map) => mapValues(map?.entries ?? {}, fromMeta);

function fromMeta(meta) {
  const { kind, [kind]: value } = meta ?? {}; // a map's entry may lack its value
  if (kind === 'int') return toInteger(value);
  if (kind === 'list') return value.items.map(fromMeta);
  return kind === 'map' ? fromMetaMap(value) : (value ?? null);
}

// A decoded int64 to a number, or to a BigInt where a number would lose digits.
export function toInteger(int64) {
  const number = Number(int64);
  return Number.isSafeInteger(number) ? number : BigInt(String(int64));
}
