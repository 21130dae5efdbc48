// The page "Will it fit?": fills <div id="fit"> with a form, a bar per technique, a command and a table.
// data.js has the predictions, which build.py makes. The question is in the URL: #model=…&task=…&length=…&batch=…&gpu=…
"use strict";

(() => {
  const home = new URL(".", document.currentScript.src);
  const PARTS = ["weights", "gradients", "optimizer state", "activations", "other", "CUDA"];
  const TASKS = {
    "text-classification": "text classification",
    "instruction-tuning": "instruction tuning",
    "image-classification": "image classification",
  };
  const OWN = "another GPU";
  const VERDICTS = { fits: "✓ fits", close: "? may fit", no: "✗ does not fit", host: "✗ too little CPU memory" };
  const GB = 1e9;

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // Return the bytes of a GPU: a whole number of GB is the size as sold, as `card_memory` in planning/gpus.py has it
  function cardMemory(size) {
    if (!Number.isInteger(size)) return size * GB;
    const sold = size * 2 ** 30;
    return sold - Math.min(0.05 * sold, 2 ** 29 + 0.01 * sold);
  }

  // Return the place of a row among all: what fits comes first, then what may fit.
  const rank = ({ verdict }) => ({ fits: 0, close: 1 })[verdict] ?? 2;

  // Return the answer for each technique: the parts, the bounds and the CPU memory in bytes, and the verdict.
  // Rows of one rank have the planner's order: all weights first, then the least cost and the highest speed, then the
  // least memory.
  function answer(question) {
    const model = FIT.models[question.model];
    const peaks = model.tasks[question.task][question.length];
    const column = FIT.sizes.indexOf(question.batch);
    const host = FIT.host[question.model][question.task].map((value) => value * 1e6);
    const rows = FIT.rows.flatMap((facts, number) => {
      if (question.old && !facts.suits) return [];
      const peak = (question.old && peaks[`${number}old`]) || peaks[number]; // in 32 bits all GPUs take the same
      const whole = [...peak[0].slice(0, 6 - peak[column].length), ...peak[column]]; // see stored.py
      const [weights, gradients, optimizer, activations, logits, other] = whole.map((value) => value * 1e6);
      const tensors = weights + gradients + optimizer + activations + logits + other;
      const [low, expected, high] = FIT.overhead[question.overhead].map(
        ([context, workspace, fragmentation]) => tensors + context + workspace + fragmentation * (tensors + workspace),
      );
      const parts = [weights, gradients, optimizer, activations + logits, other, expected - tensors];
      let verdict = high <= question.memory ? "fits" : low <= question.memory ? "close" : "no";
      if (verdict !== "no" && host[number] > question.host * GB) verdict = "host";
      const place = FIT.order[question.task][number][column];
      const row = { ...facts, parts, low, expected, high, verdict, place, host: host[number] };
      return [{ ...row, command: command(question, facts) }];
    });
    return rows.sort((one, other) => rank(one) - rank(other) || one.place - other.place || one.expected - other.expected);
  }

  function command(question, { rung, options, whole }) {
    const words = ["python", `src/${rung}.py`, "--model", FIT.models[question.model].name];
    if (question.task !== "text-classification") words.push("--task", question.task);
    if (question.task === "instruction-tuning") words.push("--dataset", "answers.jsonl");
    if (question.task === "text-classification") words.push("--dataset", "texts.csv");
    if (question.task === "image-classification") words.push("--dataset", "photos/");
    else words.push("--max_length", question.length);
    if (!whole) words.push("--micro_batch_size", question.batch);
    if (whole || question.batch === 16) words.push("--batch_size", whole ? question.batch : 32);
    return options ? `${words.join(" ")} ${options}` : words.join(" ");
  }

  // Return the question in the URL. Values that the data do not have are replaced, and `replaced` says which.
  function readQuestion() {
    const given = new URLSearchParams(location.hash.slice(1));
    const replaced = [];
    const choose = (name, values, usual) => {
      const value = given.get(name) ?? String(usual);
      const found = values.find((each) => String(each) === value) ?? values.find((each) => each === usual) ?? values[0];
      if (given.has(name) && value !== String(found)) replaced.push(`${name} ${value} (shown: ${found})`);
      return found;
    };
    const model = choose("model", Object.keys(FIT.models), "Qwen3 8B");
    const task = choose("task", Object.keys(FIT.models[model].tasks), "instruction-tuning");
    const length = choose("length", Object.keys(FIT.models[model].tasks[task]), "1024");
    const batch = choose("batch", FIT.sizes, 1);
    const gpu = given.get("gpu") ?? "RTX 4090";
    const known = FIT.gpus.find(([name]) => name === gpu);
    const own = Number(gpu) > 0 ? Number(gpu) : 24;
    const [name, gigabytes, old, overhead] = known ?? [OWN, own, given.get("old") === "1" ? 1 : 0, 0];
    const memory = known ? gigabytes * GB : cardMemory(gigabytes);
    const host = Number(given.get("host")) > 0 ? Number(given.get("host")) : FIT.host_memory;
    if (!known && !(Number(gpu) > 0)) replaced.push(`gpu ${gpu} (shown: ${OWN})`);
    const rest = { hide: given.get("hide") === "1", row: given.get("row"), replaced };
    return { model, task, length, batch, gpu: name, gigabytes, memory, overhead, host, old, ...rest };
  }

  function writeQuestion(question) {
    const own = question.gpu === OWN;
    const values = new URLSearchParams({
      model: question.model, task: question.task, length: question.length, batch: question.batch,
      gpu: own ? question.gigabytes : question.gpu,
    });
    if (Number(question.host) !== FIT.host_memory) values.set("host", question.host);
    if (own && question.old) values.set("old", "1");
    if (question.hide) values.set("hide", "1");
    if (question.row) values.set("row", question.row);
    history.replaceState(null, "", `#${values}`);
  }

  function gigabytes(bytes, digits = 1) {
    return (bytes / GB).toFixed(digits);
  }

  function field(label, control) {
    control.id = `fit-${control.name}`;
    return element("div", { className: "fit-field" }, element("label", { htmlFor: control.id, textContent: label }), control);
  }

  function select(name, values, chosen) {
    const made = element("select", { name });
    for (const [value, text] of values) {
      made.append(element("option", { value, textContent: text, selected: String(value) === String(chosen) }));
    }
    return made;
  }

  function form(question) {
    const model = FIT.models[question.model];
    const fields = [
      field("Model", select("model", Object.keys(FIT.models).map((name) => [name, name]), question.model)),
      field("Task", select("task", Object.keys(model.tasks).map((task) => [task, TASKS[task]]), question.task)),
    ];
    if (question.task !== "image-classification") {
      const lengths = Object.keys(model.tasks[question.task]).map((length) => [length, `${length} tokens`]);
      fields.push(field("Length of the texts", select("length", lengths, question.length)));
    }
    fields.push(field("Samples in a micro-batch", select("batch", FIT.sizes.map((size) => [size, size]), question.batch)));
    const gpus = FIT.gpus.map(([name, size]) => [name, `${name}, ${size.toFixed(1)} GB`]);
    fields.push(field("GPU", select("gpu", [...gpus, [OWN, OWN]], question.gpu)));
    const number = (name) =>
      element("input", { name, type: "number", min: "1", max: "10000", step: "any", value: question[name] });
    if (question.gpu === OWN) {
      const size = number("gigabytes");
      const years = [[0, "8.0 or higher"], [1, "below 8.0"]];
      fields.push(field("Its memory in GB", size), field("Compute capability", select("old", years, question.old)));
    }
    fields.push(field("CPU memory in GB", number("host")));
    const hide = [["", "shown"], ["1", "hidden"]];
    fields.push(field("What does not fit is", select("hide", hide, question.hide ? "1" : "")));
    return element("form", { className: "fit-form" }, ...fields);
  }

  function bar(row, question, scale) {
    const made = element("span", { className: "fit-bar" });
    row.parts.forEach((part, number) => {
      const piece = element("span", { className: `fit-part fit-part-${number}` });
      piece.style.width = `${(100 * part) / scale}%`;
      made.append(piece);
    });
    const line = element("span", { className: "fit-line" });
    line.style.left = `${(100 * question.memory) / scale}%`;
    const over = row.expected > scale ? [element("span", { className: "fit-over", textContent: "▸" })] : [];
    const track = element("span", { className: "fit-track" }, made, line, ...over);
    track.setAttribute("aria-hidden", "true"); // the label and the table have the figures
    return track;
  }

  function bars(rows, question) {
    const longest = Math.max(...rows.map((row) => row.high));
    const scale = Math.max(1.15 * question.memory, Math.min(longest, 2 * question.memory));
    const made = element("fieldset", { className: "fit-rows" });
    made.append(element("legend", { textContent: "Choose a technique to see its command" }));
    for (const [number, row] of rows.entries()) {
      if (question.hide && rank(row) === 2 && row !== question.chosen) continue;
      const radio = element("input", { type: "radio", name: "row", value: number, checked: row === question.chosen });
      const title = element("span", { className: "fit-title", textContent: `${row.rung.split("_")[0]} · ${row.title}` });
      const size = element("span", { className: "fit-size", textContent: `${gigabytes(row.expected)} GB` });
      const cpu = element("span", { className: "fit-size fit-cpu", textContent: `CPU ${gigabytes(row.host)} GB` });
      const mark = row.best ? ", the planner's choice" : "";
      const verdict = element("span", { className: `fit-verdict fit-${row.verdict}`, textContent: VERDICTS[row.verdict] + mark });
      made.append(element("label", { className: "fit-row" }, radio, title, size, cpu, verdict, bar(row, question, scale)));
    }
    return made;
  }

  function legend(question) {
    const items = PARTS.map((part, number) =>
      element("li", {}, element("span", { className: `fit-key fit-part-${number}` }), part === "CUDA" ? "CUDA's own" : part),
    );
    items.push(element("li", {}, element("span", { className: "fit-key fit-key-line" }), `the GPU's ${gigabytes(question.memory)} GB`));
    return element("ul", { className: "fit-legend" }, ...items);
  }

  function table(rows) {
    const names = ["Technique", "Verdict", ...PARTS, "expected", "low", "high", "CPU memory"];
    const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col", textContent: name })));
    const body = rows.map((row) => {
      const values = [...row.parts, row.expected, row.low, row.high, row.host].map((value) => gigabytes(value, 2));
      const cells = [VERDICTS[row.verdict].slice(2), ...values].map((value) => element("td", { textContent: value }));
      const line = element("tr", {}, element("th", { scope: "row", textContent: `${row.rung}: ${row.title}` }), ...cells);
      line.dataset.command = row.command;
      if (row.best) line.dataset.best = "";
      return line;
    });
    const caption = element("caption", { textContent: "Predicted GPU memory in GB, and CPU memory. Activations include the logits." });
    const made = element("table", {}, caption, element("thead", {}, head), element("tbody", {}, ...body));
    const frame = element("div", { className: "fit-table", tabIndex: 0 }, made);
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", "Table of the figures");
    return frame;
  }

  // Return a button that copies a text, or selects an element where a browser refuses the clipboard to files.
  function copyButton(label, text, shown) {
    const made = element("button", { type: "button", textContent: label });
    made.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text());
        made.textContent = "Copied";
      } catch {
        if (shown.textContent !== text()) shown.textContent = text();
        getSelection().selectAllChildren(shown);
        made.textContent = "Selected";
      }
    });
    return made;
  }

  function commandBox(row) {
    const words = row.command.split(" ").flatMap((word) => [" ", element("span", { textContent: word })]);
    const code = element("code", {}, ...words.slice(1));
    const copy = copyButton("Copy the command", () => row.command, code);
    const text = `Rung ${row.rung.split("_")[0]}, ${row.title}, takes ${gigabytes(row.low)} to ${gigabytes(row.high)} GB and ${gigabytes(row.host)} GB of CPU memory, predicted:`;
    return element("div", { className: "fit-command" }, element("p", { textContent: text }), element("pre", {}, code), copy);
  }

  function summary(rows, question) {
    const fitting = rows.filter((row) => row.verdict === "fits");
    const memory = `${gigabytes(question.memory)} GB`;
    const gpu = question.gpu === OWN ? memory : `the ${question.gpu} (${memory})`;
    const count = `${fitting.length} of ${rows.length} techniques fit ${gpu} and ${question.host} GB of CPU memory.`;
    return fitting.length ? count : `${count} Try shorter texts, a smaller micro-batch, or several GPUs.`;
  }

  const page = document.getElementById("fit");
  if (!page) return;
  const status = element("p", { className: "fit-summary" }); // stays, so that screen readers read its changes
  status.setAttribute("role", "status");

  function show(focus) {
    const question = readQuestion();
    const rows = answer(question);
    const known = rows.find((row) => `${row.rung} ${row.title}` === question.row);
    for (const all of [1, 0]) {
      const best = rows.find((row) => row.all === all && row.verdict === "fits");
      if (best) best.best = true; // the planner's answer for all weights, and the one for adapters
    }
    question.chosen = known ?? rows.find((row) => row.best) ?? rows[0];
    const made = FIT.models[question.model].made;
    const source = `Predicted at commit ${made.commit} with PyTorch ${made.torch} and transformers ${made.transformers}.`;
    const controls = form(question);
    const answers = bars(rows, question);
    const box = element("div", {}, commandBox(question.chosen));
    const place = () => answers.querySelector("input:checked").closest("label").after(box);
    place();
    const notes = [
      ...(question.replaced.length ? [`The address asks for what this page does not have: ${question.replaced.join(", ")}.`] : []),
      ...(question.old ? ["This GPU does not compute in bfloat16: techniques in bfloat16 are left out, and mixed precision takes float16."] : []),
    ].map((textContent) => element("p", { textContent }));
    const link = element("span", { className: "fit-source" });
    page.replaceChildren(
      controls, status, ...notes, legend(question), answers,
      element("p", {}, copyButton("Copy a link to this answer", () => location.href, link), " ", link),
      element("details", {}, element("summary", { textContent: "The figures as a table" }), table(rows)),
      element("p", { className: "fit-source", textContent: source }),
    );
    status.textContent = summary(rows, question);
    controls.addEventListener("submit", (event) => event.preventDefault());
    controls.addEventListener("change", ({ target }) => {
      const changed = { ...question, [target.name]: target.value };
      for (const name of ["gigabytes", "host"]) if (!(Number(changed[name]) > 0)) changed[name] = question[name];
      if (target.name === "old") changed.old = Number(target.value);
      writeQuestion(changed);
      show(target.id);
    });
    answers.addEventListener("change", ({ target }) => {
      const row = rows[Number(target.value)];
      writeQuestion({ ...question, row: `${row.rung} ${row.title}` });
      box.replaceChildren(commandBox(row));
      place();
    });
    if (focus) document.getElementById(focus)?.focus();
  }

  addEventListener("hashchange", () => show());
  const data = element("script", { src: new URL("data.js", home).href });
  data.addEventListener("load", () => show());
  document.head.append(data);
})();
