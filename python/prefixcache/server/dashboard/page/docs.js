// The API as openapi.json describes it: an entry for each endpoint, with its options and answers.

import { bearer } from "./stream.js";
import { byId, make, show } from "./text.js";

const DEEPEST = 4;

function nested(parent, tag, ...children) {
  const element = parent.appendChild(make(tag));
  element.append(...children);
  return element;
}

function typeName(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  const parts = schema.anyOf || schema.oneOf || schema.allOf;
  if (parts) return parts.map(typeName).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  const names = [schema.type ?? "any"].flat();
  return names.map((name) => (name === "array" ? `list of ${typeName(schema.items ?? {})}` : name)).join(" or ");
}

// The schemas with fields of their own that one stands for, each reference followed.
function* objects(schema, known) {
  if (schema.$ref) schema = known[typeName(schema)] ?? {};
  if (schema.properties) yield schema;
  for (const part of [schema.items, ...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? [])]) {
    if (part) yield* objects(part, known);
  }
}

function fields(parent, schema, known, depth = 0) {
  for (const { properties, required = [] } of depth < DEEPEST ? objects(schema, known) : []) {
    const list = nested(parent, "ul");
    for (const [name, field] of Object.entries(properties)) {
      const needed = required.includes(name) ? ", required" : "";
      const entry = nested(list, "li", make("code", name), ` ${typeName(field)}${needed} ${field.description ?? ""}`);
      fields(entry, field, known, depth + 1);
    }
  }
}

function endpoint(parent, path, method, operation, known) {
  const entry = nested(parent, "details");
  entry.className = "tree";
  nested(entry, "summary", make("code", `${method.toUpperCase()} ${path}`), ` ${operation.summary ?? ""}`);
  if (operation.description) nested(entry, "p", operation.description);
  const options = (operation.parameters ?? []).map((one) => [one.name, one.schema ?? {}]);
  if (options.length) fields(nested(entry, "div", "Parameters"), { properties: Object.fromEntries(options) }, known);
  for (const { schema } of Object.values(operation.requestBody?.content ?? {})) fields(nested(entry, "div", "Body"), schema, known);
  for (const [status, answer] of Object.entries(operation.responses ?? {})) {
    const shown = nested(entry, "div", `${status} ${answer.description ?? ""}`);
    const [first] = Object.values(answer.content ?? {});
    if (status.startsWith("2") && first?.schema) fields(shown, first.schema, known);
  }
}

async function load(key = "") {
  const headers = key ? { Authorization: bearer(key) } : {};
  const response = await fetch("openapi.json", { headers, cache: "no-store", redirect: "error" });
  byId("login").hidden = response.status !== 401;
  if (!response.ok) return show(byId("status"), `The server answered ${response.status}.`);
  const { info, paths, components } = await response.json();
  show(byId("version"), info.version);
  show(byId("status"), `${Object.keys(paths).length} paths`);
  byId("endpoints").replaceChildren();
  for (const [path, methods] of Object.entries(paths)) {
    const section = nested(byId("endpoints"), "section");
    for (const [method, operation] of Object.entries(methods)) endpoint(section, path, method, operation, components.schemas);
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  load(byId("key").value);
});
load().catch((error) => show(byId("status"), String(error.message)));
