/* The playground: streams answers into one or two panes. Text from the model becomes text nodes only. */
(() => {
  "use strict";
  const play = document.getElementById("play");
  if (!play) return;
  const $ = (id) => document.getElementById(id);
  const token = play.querySelector("[name=csrfmiddlewaretoken]").value;
  const make = (tag, css, text) => {
    const element = document.createElement(tag);
    if (css) element.className = css;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  /* markdown, the part of it that models write; every piece goes in as text */
  const inline = (into, text) => {
    const pattern = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
    let at = 0;
    for (const found of text.matchAll(pattern)) {
      into.append(text.slice(at, found.index));
      if (found[1] !== undefined) into.append(make("code", "", found[1]));
      else if (found[2] !== undefined) into.append(make("strong", "", found[2]));
      else if (found[3] !== undefined) into.append(make("em", "", found[3]));
      else {
        const link = make("a", "", found[4]);
        link.href = found[5];
        link.rel = "noopener noreferrer";
        link.target = "_blank";
        into.append(link);
      }
      at = found.index + found[0].length;
    }
    into.append(text.slice(at));
  };
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const markdown = (text) => {
    const out = document.createDocumentFragment();
    const lines = text.split("\n");
    let i = 0;
    while (i < lines.length) {
      const line = lines[i];
      const fence = line.match(/^\s*(```|~~~)(.*)$/);
      if (fence) {
        const body = [];
        i += 1;
        while (i < lines.length && !lines[i].trim().startsWith(fence[1])) body.push(lines[i++]);
        i += 1;
        const pre = make("pre", "spec");
        pre.tabIndex = 0;
        pre.append(make("code", "", body.join("\n")));
        out.append(pre);
      } else if (/^#{1,6}\s/.test(line)) {
        const heading = make("p", "strong");
        inline(heading, line.replace(/^#+\s/, ""));
        out.append(heading);
        i += 1;
      } else if (/^\s*([-*+]|\d+[.)])\s/.test(line)) {
        const list = make(/^\s*\d/.test(line) ? "ol" : "ul");
        while (i < lines.length && /^\s*([-*+]|\d+[.)])\s/.test(lines[i])) {
          const item = make("li");
          inline(item, lines[i++].replace(/^\s*([-*+]|\d+[.)])\s+/, ""));
          list.append(item);
        }
        out.append(list);
      } else if (/^\s*\|.*\|/.test(line) && /^\s*\|?[\s:|-]+$/.test(lines[i + 1] || "")) {
        const table = make("table", "table");
        const head = table.createTHead().insertRow();
        for (const cell of cells(line)) inline(head.appendChild(make("th")), cell);
        const body = table.createTBody();
        i += 2;
        while (i < lines.length && lines[i].includes("|")) {
          const row = body.insertRow();
          for (const cell of cells(lines[i])) inline(row.insertCell(), cell);
          i += 1;
        }
        out.append(table);
      } else if (line.trim() === "") {
        i += 1;
      } else {
        const paragraph = make("p");
        const start = i;
        while (i < lines.length && lines[i].trim() !== "" && (i === start || !/^\s*(```|~~~|#{1,6}\s|[-*+]\s|\d+[.)]\s)/.test(lines[i]))) {
          if (i > start) paragraph.append(make("br"));
          inline(paragraph, lines[i]);
          i += 1;
        }
        out.append(paragraph);
      }
    }
    return out;
  };

  /* what is sent */
  const number = (id) => {
    const value = $(id).value.trim().replace(",", ".");
    return value === "" || Number.isNaN(Number(value)) ? undefined : Number(value);
  };
  const options = () => {
    const tools = $("tools").value.trim();
    let parsed;
    $("tools-wrong").hidden = true;
    if (tools) {
      try { parsed = JSON.parse(tools); } catch { $("tools-wrong").hidden = false; $("tools").closest("details").open = true; return null; }
    }
    return {
      temperature: number("temperature"),
      top_p: number("top_p"),
      max_tokens: number("max_tokens"),
      reasoning_effort: $("reasoning_effort").value || undefined,
      tools: parsed,
    };
  };

  class Pane {
    constructor(element) {
      this.element = element;
      this.talk = element.querySelector("[data-talk]");
      this.stats = element.querySelector("[data-stats]");
      this.model = element.querySelector("[data-model]");
      this.messages = [];
      this.abort = null;
      this.wanted = "";
    }
    /* what can be asked changes while the page is open: trials come and go, the choice stays */
    offer(options) {
      const chosen = this.wanted || this.model.value;
      this.model.replaceChildren(...options.map((option) => option.cloneNode(true)));
      const found = this.of(chosen);
      if (found) this.choose(found);
      else if (chosen) {
        const gone = make("option", "", `${chosen} (ended)`);
        gone.value = chosen;
        gone.disabled = true;
        this.model.append(gone);
        gone.selected = true;
      }
    }
    of(value) { return [...this.model.options].find((option) => option.value === value); }
    choose(option) {
      this.wanted = option.disabled ? option.value : "";
      option.selected = true;
    }
    clear() {
      this.abort?.abort();
      this.messages = [];
      this.stats.textContent = "";
      for (const turn of this.talk.querySelectorAll(".turn")) turn.remove();
      const empty = this.talk.querySelector("[data-empty]");
      if (empty) empty.hidden = false;
    }
    add(role) {
      const empty = this.talk.querySelector("[data-empty]");
      if (empty) empty.hidden = true;
      const turn = make("div", `turn ${role}`);
      this.who = turn.appendChild(make("div", "turn-who small dim", role === "user" ? "You" : this.model.value));
      const body = turn.appendChild(make("div", "turn-body"));
      this.talk.append(turn);
      this.end();
      return body;
    }
    end() { this.talk.scrollTop = this.talk.scrollHeight; }
    async ask(text, chosen) {
      this.messages.push({ role: "user", content: text });
      this.add("user").append(make("p", "", text));
      const system = $("system").value.trim();
      const body = this.add("assistant");
      body.append(make("p", "dim", "…"));
      const answer = { content: "", reasoning: "", calls: [] };
      const started = performance.now();
      let first = 0;
      let usage = null;
      let timings = null;
      this.abort = new AbortController();
      let queued = false;
      const draw = () => {
        queued = false;
        const near = this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 60;
        const open = body.querySelector("details.thought")?.open;
        body.replaceChildren();
        if (answer.reasoning) {
          const thought = make("details", "thought");
          thought.open = open ?? false;
          thought.append(make("summary", "small", answer.content ? "Reasoning" : "Reasoning…"), make("div", "thought-text small", answer.reasoning));
          body.append(thought);
        }
        body.append(markdown(answer.content));
        for (const call of answer.calls) {
          const box = make("div", "call");
          box.append(make("span", "chip accent", `calls ${call.name}`), make("pre", "spec wraps", call.arguments));
          body.append(box);
        }
        if (near) this.end();
      };
      const later = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
      const fail = (message) => { body.append(make("p", "wrong-turn", message)); };
      const take = (chunk) => {
        if (chunk.error) { later(); throw new Error(chunk.error.message || "The response was interrupted."); }
        usage = chunk.usage || usage;
        timings = chunk.timings || timings;
        const delta = chunk.choices?.[0]?.delta || chunk.choices?.[0]?.message || {};
        if (!first && (delta.content || delta.reasoning_content || delta.tool_calls)) first = performance.now();
        answer.content += delta.content || "";
        answer.reasoning += delta.reasoning_content || delta.reasoning || "";
        for (const part of delta.tool_calls || []) {
          const call = (answer.calls[part.index ?? 0] ??= { id: part.id, name: "", arguments: "" });
          call.name += part.function?.name || "";
          call.arguments += part.function?.arguments || "";
        }
        later();
      };
      try {
        const reply = await fetch(play.dataset.url, {
          method: "POST",
          signal: this.abort.signal,
          headers: { "Content-Type": "application/json", "X-CSRFToken": token },
          body: JSON.stringify({
            model: this.model.value,
            messages: system ? [{ role: "system", content: system }, ...this.messages] : this.messages,
            stream: true,
            stream_options: { include_usage: true },
            ...chosen,
          }),
        });
        this.generation = reply.headers.get("x-mm-generation");
        if (this.generation) this.who.textContent = `generation ${this.generation}`;
        if (!reply.ok) {
          const said = await reply.json().catch(() => null);
          throw new Error(said?.error?.message || `The gate returned status ${reply.status}.`);
        }
        const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        for (;;) {
          const { done, value } = await reader.read();
          if (done) break;
          rest += value;
          const events = rest.split(/\r?\n\r?\n/);
          rest = events.pop();
          for (const event of events)
            for (const line of event.split(/\r?\n/))
              if (line.startsWith("data:") && line.slice(5).trim() !== "[DONE]") take(JSON.parse(line.slice(5)));
        }
        draw();
        if (!answer.content && !answer.reasoning && !answer.calls.length) fail("The response was empty.");
      } catch (error) {
        draw();
        fail(error.name === "AbortError" ? "Stopped." : error.message);
      }
      const took = (performance.now() - (first || started)) / 1000;
      const tokens = usage?.completion_tokens;
      const speed = timings?.predicted_per_second || (tokens && took > 0 ? tokens / took : 0);
      this.stats.textContent = [
        this.generation,
        tokens !== undefined ? `${tokens} tokens` : "",
        speed ? `${speed.toFixed(1)} tok/s` : "",
        first ? `time to first token ${((first - started) / 1000).toFixed(2)} s` : "",
      ].filter(Boolean).join(", ");
      this.messages.push({
        role: "assistant",
        content: answer.content || null,
        ...(answer.calls.length ? { tool_calls: answer.calls.map((c) => ({ id: c.id, type: "function", function: { name: c.name, arguments: c.arguments } })) } : {}),
      });
      this.abort = null;
    }
  }

  const panes = [new Pane(play.querySelector("[data-pane]"))];
  const beside = $("beside");
  /* the second pane asks what is on trial of the same deployment, else the next model */
  const partner = (options, first) => {
    const same = options.filter((option) => option.dataset.of === first?.dataset.of);
    return same.find((option) => option !== first && (option.dataset.trial !== undefined) !== (first.dataset.trial !== undefined))
      || options[Math.min(1, options.length - 1)];
  };
  const sideBySide = (on) => {
    beside.setAttribute("aria-pressed", String(on));
    $("panes").classList.toggle("two", on);
    if (on) {
      const copy = panes[0].element.cloneNode(true);
      copy.setAttribute("aria-label", "Second chat");
      const model = copy.querySelector("[data-model]");
      model.id = "model-1";
      copy.querySelector("label").htmlFor = "model-1";
      $("panes").append(copy);
      const pane = new Pane(copy);
      pane.clear();
      const first = panes[0].model;
      pane.choose(partner([...model.options], model.options[first.selectedIndex]));
      model.addEventListener("change", () => { pane.wanted = ""; });
      panes.push(pane);
    } else {
      panes.pop().element.remove();
    }
  };
  beside.addEventListener("click", () => sideBySide(panes.length === 1));
  panes[0].model.addEventListener("change", () => { panes[0].wanted = ""; });
  new MutationObserver(() => {
    const offered = document.getElementById("models");
    if (offered) for (const pane of panes) pane.offer([...offered.options]);
  }).observe($("trials"), { subtree: true, childList: true, attributes: true });
  const asked = panes[0].model.querySelector(`option[data-of="${CSS.escape(play.dataset.beside)}"]`);
  if (asked) { panes[0].choose(asked); sideBySide(true); }
  $("clear").addEventListener("click", () => { for (const pane of panes) pane.clear(); $("prompt").focus(); });
  $("halt").addEventListener("click", () => { for (const pane of panes) pane.abort?.abort(); });
  const busy = (yes) => { $("halt").hidden = !yes; $("send").disabled = yes; };
  $("composer").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = $("prompt").value.trim();
    const chosen = options();
    if (!text || !chosen || $("send").disabled) return;
    $("prompt").value = "";
    busy(true);
    await Promise.allSettled(panes.map((pane) => pane.ask(text, chosen)));
    busy(false);
    $("prompt").focus();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("composer").requestSubmit(); }
  });
})();
