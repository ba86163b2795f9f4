// What a caller hands to the client, checked before anything is sent.

import { X509Certificate } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { inspect } from 'node:util';
import grpc from '@grpc/grpc-js';
import { misuse, PolicyError } from './policy_errors.js';
import { ConformanceError } from './spaces.js';

const LONGEST_TIMER_MS = 2 ** 31 - 1; // 24 days; Node runs a longer timer for 1 ms
const MAX_ENV_INDEX = 2 ** 31 - 1; // an int32 in proto/

// Returns the address as gRPC takes it. Without a port gRPC would take 443.
export function checkAddress(address) {
  const target = typeof address === 'string' ? address.replace(/^rlmesh:\/\//, '') : '';
  const [, port] = /^(?:[^\s/:]+|\[[^\s/\]]+\]):(\d+)$/.exec(target) ?? [];
  if (/^unix:./.test(target) || (port >= 1 && port <= 65_535)) return target;
  throw misuse(`${inspect(address)} is no address: name the server's HOST:PORT or unix:PATH`);
}

// Returns the credentials of a channel: plain text, TLS with an authority, or the caller's own.
export function checkCredentials(tlsCa, credentials) {
  if (tlsCa === undefined) return credentials ?? grpc.credentials.createInsecure();
  if (credentials === undefined) return grpc.credentials.createSsl(readTlsCa(tlsCa));
  throw misuse('tlsCa and credentials exclude each other: give one of the two');
}

// Returns the content of a PEM file. gRPC would take any file, and trust no certificate then.
export function readTlsCa(file) {
  try {
    if (typeof file !== 'string') throw new Error('it is no path');
    const pem = readFileSync(file);
    if (!pem.includes('-----BEGIN CERTIFICATE-----')) throw new Error('it holds no certificate');
    new X509Certificate(pem); // throws if it is malformed
    return pem;
  } catch (error) {
    const remedy = "name the PEM file of the authority that signed the endpoint's certificate";
    const shown = typeof file === 'string' ? file : 'of tlsCa';
    throw misuse(`the authority ${shown} cannot be used (${error.message}); ${remedy}`);
  }
}

export function checkToken(token) {
  // gRPC would show the token in its own error.
  if (/^[!-~]([ -~]*[!-~])?$/.test(token)) return token;
  throw new PolicyError('UNAUTHENTICATED', 'the token must be printable ASCII characters');
}

// Returns how long a timer shall run.
export function checkTimeout(timeoutMs) {
  if (typeof timeoutMs === 'number' && timeoutMs >= 0) return Math.min(timeoutMs, LONGEST_TIMER_MS);
  const allowed = 'a number of milliseconds from 0, or Infinity to wait as long as it takes';
  throw misuse(`timeoutMs is ${inspect(timeoutMs)}: give ${allowed}`);
}

export function checkContract(contract) {
  const needed = ['actionSpace', 'observationSpace'];
  const missing = needed.filter((name) => !contract?.[name]?.spec).join(' and no ');
  if (!missing) return;
  throw misuse(`the contract has no ${missing}: describe it with box, discrete … from spaces.js`);
}

// protobuf would cut a wrong env_index to a right one: that of another lane.
export function checkSlots(slots) {
  for (const [row, slot] of (slots ?? []).entries()) {
    const index = slot?.env_index;
    if (Number.isInteger(index) && index >= 0 && index <= MAX_ENV_INDEX) continue;
    const allowed = `an integer from 0 to ${MAX_ENV_INDEX}, the number of a lane`;
    throw new ConformanceError(`slots[${row}].env_index: is ${inspect(index)}, not ${allowed}`);
  }
}
