// The command line of a program here: its options, its help, and errors in one line.

import { parseArgs } from 'node:util';

// Ends the program; 2 means that the command line or the installation is wrong.
export function giveUp(message, code = 2) {
  console.error(`error: ${message}`);
  process.exit(code);
}

// Returns { values, positionals } as parseArgs does. `help` is what --help prints.
export function parse(help, config) {
  const options = { ...config.options, help: { type: 'boolean', short: 'h' } };
  let parsed;
  try {
    parsed = parseArgs({ ...config, options });
  } catch (error) {
    giveUp(`${error.message.split(/\.\s/)[0]}; --help shows the options`);
  }
  if (!parsed.values.help) return parsed;
  console.log(help);
  return process.exit(0);
}

// Imports a module of this folder, or a package that `npm ci` installs here.
export async function load(name) {
  try {
    return await import(name);
  } catch (error) {
    const isMissing = error.code === 'ERR_MODULE_NOT_FOUND';
    const remedy = isMissing ? `; run npm ci --ignore-scripts in ${import.meta.dirname}` : '';
    return giveUp(`${error.message}${remedy}`);
  }
}
