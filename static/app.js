/* Behaviour that every page shares. Pages work without it, but for what must be live. */
(() => {
  "use strict";
  const root = document.documentElement;
  const on = (type, selector, act) =>
    document.addEventListener(type, (event) => {
      const target = event.target instanceof Element && event.target.closest(selector);
      if (target) act(target, event);
    });
  const say = (text) => {
    const line = document.getElementById("say");
    if (line) line.textContent = text;
  };

  /* theme: system, light, dark; kept in this browser */
  const themes = ["system", "light", "dark"];
  const theme = () => root.dataset.theme || "system";
  const nameTheme = () => {
    for (const label of document.querySelectorAll("[data-theme-name]")) label.textContent = theme();
  };
  on("click", "[data-theme-toggle]", () => {
    const next = themes[(themes.indexOf(theme()) + 1) % themes.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    try { localStorage.setItem("mm-theme", next); } catch { /* kept for this page only */ }
    nameTheme();
    say(`Theme: ${next}`);
  });

  /* copy */
  on("click", "[data-copy]", async (button) => {
    const source = document.querySelector(button.dataset.copy);
    const text = source ? (source.value ?? source.textContent) : "";
    const label = button.querySelector("[data-label]") || button;
    const before = button.dataset.before || label.textContent;
    button.dataset.before = before;
    try {
      await navigator.clipboard.writeText(text.trim());
    } catch {
      const range = document.createRange();
      range.selectNodeContents(source);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      if (!document.execCommand("copy")) { say("Copying is not allowed. The text is selected: press Ctrl+C."); return; }
      getSelection().removeAllRanges();
    }
    label.textContent = "Copied";
    say("Copied");
    setTimeout(() => { label.textContent = before; }, 1600);
  });

  /* times: "3 min ago" goes on counting */
  const units = [[31536000, "y"], [2592000, "mo"], [86400, "d"], [3600, "h"], [60, "min"]];
  const rounded = (seconds) => {
    for (const [size, unit] of units) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
    return `${Math.max(0, Math.floor(seconds))} s`;
  };
  const clock = (seconds) => {
    const s = Math.max(0, Math.floor(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
    return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  };
  const tick = () => {
    const now = Date.now();
    for (const time of document.querySelectorAll("time[data-ago]")) {
      const seconds = (now - Date.parse(time.dateTime)) / 1000;
      const text = time.dataset.ago === "since" ? clock(seconds)
        : seconds < 10 && seconds > -10 ? "just now"
        : seconds < 0 ? `in ${rounded(-seconds)}` : `${rounded(seconds)} ago`;
      if (time.textContent !== text) time.textContent = text;
    }
  };
  setInterval(tick, 1000);

  /* the sheet: a page's form shown over the page that asked for it */
  const sheet = document.getElementById("sheet");
  on("click", "a[data-sheet]", async (link, event) => {
    if (!sheet || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    try {
      const answer = await fetch(link.href, { headers: { "X-Sheet": "1" } });
      if (!answer.ok || answer.redirected) throw new Error(String(answer.status));
      const body = sheet.querySelector("[data-sheet-body]");
      body.innerHTML = await answer.text();
      if (window.htmx) htmx.process(body);
      sheet.showModal();
      (body.querySelector("[autofocus]") || body.querySelector("input:not([type=hidden]), textarea, button"))?.focus();
    } catch {
      location.href = link.href;
    }
  });
  on("click", "[data-sheet-close]", (button, event) => {
    if (sheet?.open) { event.preventDefault(); sheet.close(); }
  });
  sheet?.addEventListener("click", (event) => { if (event.target === sheet) sheet.close(); });

  /* what the person ticked or opened stays so when a fragment is refreshed under it */
  document.addEventListener("DOMContentLoaded", () => {
    if (!window.Idiomorph) return;
    Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) =>
      !((name === "checked" && node.dataset.pick !== undefined) || (name === "open" && node.tagName === "DETAILS"));
  });

  /* a form is sent once */
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.method !== "post" || event.defaultPrevented) return;
    setTimeout(() => {
      for (const button of form.querySelectorAll("button:not([type=button])")) button.disabled = true;
    });
  });
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) for (const button of document.querySelectorAll("button[disabled]:not([data-off])")) button.disabled = false;
  });
  on("change", "form[data-auto] select, form[data-auto] input[type=checkbox]", (field) => field.form.requestSubmit());

  /* at most two generations are picked for a comparison */
  on("change", "input[data-pick]", (box) => {
    const picked = [...document.querySelectorAll("input[data-pick]:checked")];
    if (picked.length > 2) picked.find((other) => other !== box).checked = false;
    const button = document.getElementById("compare-picked");
    if (button) button.disabled = document.querySelectorAll("input[data-pick]:checked").length !== 2;
  });

  /* an editor keeps Tab for indenting only after the person started to type in it; Esc gives it back */
  on("keydown", "textarea.code", (area, event) => {
    if (event.key === "Escape") { area.dataset.free = "1"; return; }
    if (event.key !== "Tab" || event.shiftKey || area.dataset.free || !area.dataset.typed) return;
    event.preventDefault();
    area.setRangeText("  ", area.selectionStart, area.selectionEnd, "end");
  });
  on("input", "textarea.code", (area) => { area.dataset.typed = "1"; delete area.dataset.free; });

  /* the editor's form: shown where it can work; the parser's word stands beside its field */
  for (const part of document.querySelectorAll("[data-needs-js]")) part.hidden = false;
  const blame = () => {
    const found = document.getElementById("spec-problem");
    if (!found) return;
    for (const old of document.querySelectorAll("[data-row] > .wrong")) old.remove();
    for (const old of document.querySelectorAll("[data-row] [aria-invalid]")) old.removeAttribute("aria-invalid");
    let row = null;
    for (let name = found.dataset.field; name && !row; name = name.replace(/(^|[.[])[^.[]*$/, ""))
      row = document.querySelector(`[data-row="${CSS.escape(name)}"]`);
    if (!row) return;
    const message = document.createElement("p");
    message.className = "wrong";
    message.textContent = found.dataset.message;
    row.append(message);
    row.querySelector("input, select, textarea")?.setAttribute("aria-invalid", "true");
    for (let at = row.closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
  };
  document.addEventListener("htmx:afterSettle", blame);

  /* log: follow, search */
  const view = document.getElementById("log");
  if (view) {
    let following = true;
    const box = document.getElementById("log-follow");
    let due = 0;
    const end = () => {
      due ||= requestAnimationFrame(() => { due = 0; view.scrollTop = view.scrollHeight; });
    };
    const follow = (yes) => { following = yes; if (box) box.setAttribute("aria-pressed", String(yes)); if (yes) end(); };
    view.addEventListener("scroll", () => {
      const near = view.scrollHeight - view.scrollTop - view.clientHeight < 30;
      if (near !== following) follow(near);
    });
    box?.addEventListener("click", () => follow(!following));
    const search = document.getElementById("log-search");
    const sieve = () => {
      const wanted = search?.value.toLowerCase() || "";
      let count = 0;
      for (const line of view.querySelectorAll("[data-line]")) {
        const hit = !wanted || line.textContent.toLowerCase().includes(wanted);
        line.hidden = !hit;
        if (hit && wanted) count += 1;
      }
      document.getElementById("log-count").textContent = wanted ? `${count} ${count === 1 ? "line" : "lines"}` : "";
      if (!wanted && following) end();
    };
    search?.addEventListener("input", sieve);
    view.addEventListener("htmx:afterSettle", sieve);
    document.addEventListener("mm:log", (event) => {
      const last = Number(view.dataset.last || 0);
      if (event.detail.id <= last) return;
      view.dataset.last = event.detail.id;
      view.querySelector("[data-empty]")?.remove();
      view.insertAdjacentHTML("beforeend", event.detail.html);
      while (view.childElementCount > 4000) view.firstElementChild.remove();
      if (search?.value) sieve();
      if (following) end();
    });
    end();
  }

  /* live: one stream a visible page; the server says what changed, the fragments fetch themselves */
  const address = document.body.dataset.stream;
  let stream = null;
  let lost = false;
  const state = (word) => {
    root.dataset.stream = word;
    for (const line of document.querySelectorAll("[data-stream-word]"))
      line.textContent = word === "on" ? "Live updates on" : word === "lost" ? "Reconnecting…" : "Updates paused";
  };
  const open = () => {
    if (!address || stream) return;
    const url = new URL(address, location.href);
    const last = view?.dataset.last;
    if (last) url.searchParams.set("after", last);
    const parts = document.body.dataset.parts;
    if (parts) {
      url.searchParams.set("parts", parts);
      url.searchParams.set("page", location.pathname + location.search);
    }
    stream = new EventSource(url);
    stream.onopen = () => {
      state("on");
      if (lost && window.htmx) htmx.trigger(document.body, "mm:tick");
      lost = false;
    };
    stream.onerror = () => {
      state("lost");
      lost = true;
      if (stream.readyState === EventSource.CLOSED) { stream = null; setTimeout(open, 5000); }
    };
    stream.addEventListener("change", (event) => {
      for (const kind of JSON.parse(event.data)) htmx.trigger(document.body, `mm:${kind}`);
    });
    stream.addEventListener("fragment", (event) => {
      const made = document.createElement("template");
      made.innerHTML = JSON.parse(event.data);
      const fresh = made.content.firstElementChild;
      const old = fresh && document.getElementById(fresh.id);
      if (!old) return;
      const token = document.querySelector("input[name=csrfmiddlewaretoken]")?.value || "";
      for (const own of fresh.querySelectorAll("input[name=csrfmiddlewaretoken]")) own.value = token;
      Idiomorph.morph(old, fresh, { morphStyle: "outerHTML" });
      const shown = document.getElementById(fresh.id);
      if (shown) htmx.process(shown);
      tick();
    });
    stream.addEventListener("log", (event) =>
      document.dispatchEvent(new CustomEvent("mm:log", { detail: JSON.parse(event.data) })));
    stream.addEventListener("bye", () => { stream.close(); stream = null; location.reload(); });
  };
  const close = () => { stream?.close(); stream = null; lost = true; state("paused"); };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", () => stream?.close());

  document.addEventListener("htmx:afterSettle", tick);
  document.addEventListener("DOMContentLoaded", () => { nameTheme(); tick(); if (!document.hidden) open(); });
})();
