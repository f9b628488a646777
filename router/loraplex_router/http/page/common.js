"use strict";
// Texts of models, names and errors are set as text alone. Credentials stay in the field and go into a header.

const byId = (id) => document.getElementById(id);

function element(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function headers() {
  const token = byId("token").value.trim();
  return token ? { authorization: `Bearer ${token}` } : {};
}

async function errorOf(answer) {
  try {
    const { error } = await answer.json();
    return `${answer.status}: ${typeof error === "string" ? error : error.message}`;
  } catch {
    return `${answer.status}: ${answer.statusText}`;
  }
}
