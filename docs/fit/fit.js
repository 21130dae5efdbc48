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
  const PASTED = "the pasted config.json";
  const LENGTHS = ["128", "256", "512", "1024", "2048", "4096"]; // of a model that is not in the list
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

  // Return the peak of a row by parts in bytes, without what several GPUs add; undefined: it was not predicted.
  function peakOf(question, facts, number) {
    const peaks = FIT.models[question.model].tasks[question.task][question.length];
    const own = question.old && facts.old === "own" ? "old" : "";
    const found = peaks[`${facts.base ?? number}${own}`];
    const peak = found?.[FIT.sizes.indexOf(question.batch)];
    return peak && [...found[0].slice(0, 6 - peak.length), ...peak].map((value) => value * 1e6); // see stored.py
  }

  // Add what sharding over several GPUs and another rank of the adapters change in a peak.
  function adjust(peak, question, facts, number) {
    const known = FIT.facts[question.model][question.task];
    const share = known.shares[number]?.[FIT.gpu_counts.indexOf(question.gpus)] ?? [];
    const parts = peak.map((value, part) => value + (share[part] ?? 0) * 1e6);
    if (facts.adapters) {
      const [weights, layers] = known.adapters[/attention/.test(facts.options) ? 0 : 1];
      const more = question.rank - FIT.lora_rank;
      const kept = /checkpointing/.test(facts.options) ? 0 : 2 * layers * question.length * question.batch; // in 16 bits
      [4 * weights, 4 * weights, 8 * weights, kept].forEach((bytes, part) => (parts[part] += more * bytes));
    }
    const missing = (share[6] ?? 0) * 1e6 - parts.reduce((one, other) => one + other);
    parts[5] += Math.max(0, missing); // the peak of another moment
    return parts;
  }

  // Return the answer for each technique: the parts, the bounds and the CPU memory in bytes, and the verdict.
  // Rows of one verdict have the planner's order: least measured loss of accuracy, all weights first, highest speed, then
  // the least memory.
  function answer(question) {
    const { host } = FIT.facts[question.model][question.task];
    const order = FIT.order[question.task][question.gpus > 1 ? 1 : 0][question.rank === FIT.lora_rank ? 0 : 1];
    const column = FIT.sizes.indexOf(question.batch);
    const rows = FIT.rows.flatMap((facts, number) => {
      if ((question.old && !facts.old) || (question.gpus === 1 && !facts.single) || !host[number].length) return [];
      const peak = peakOf(question, facts, number);
      if (!peak) return question.missing.push(`${facts.rung.split("_")[0]} ${facts.title}`) && [];
      const several = facts.several && question.gpus > 1;
      const [weights, gradients, optimizer, activations, logits, other] = adjust(peak, question, facts, number);
      const tensors = weights + gradients + optimizer + activations + logits + other;
      const [low, expected, high] = FIT.overhead[question.overhead].map(
        ([context, workspace, fragmentation], bound) =>
          tensors + context + workspace + fragmentation * (tensors + workspace) + (several ? FIT.nccl[bound] : 0),
      );
      const parts = [weights, gradients, optimizer, activations + logits, other, expected - tensors];
      let verdict = high <= question.memory ? "fits" : low <= question.memory ? "close" : "no";
      const needed = host[number][several ? FIT.gpu_counts.indexOf(question.gpus) : 0] * 1e6;
      if (verdict !== "no" && needed > question.host * GB) verdict = "host";
      const usual = !facts.adapters || question.rank === FIT.lora_rank;
      const cost = usual ? facts.costs[question.batch === 1 ? 0 : 1] : null; // the first one for a batch of one sample
      const row = { ...facts, parts, low, expected, high, verdict, place: order[number][column], host: needed, cost };
      return [{ ...row, command: command(question, facts) }];
    });
    return rows.sort((one, other) => rank(one) - rank(other) || one.place - other.place || one.expected - other.expected);
  }

  const join = (...parts) => parts.map((part) => (/\s/.test(part) ? `"${part}"` : part)).join(" ");

  function command(question, { rung, options, whole, adapters, several }) {
    const parts = ["python", `src/${rung}.py`, "--model", FIT.models[question.model].name];
    if (question.task !== "text-classification") parts.push("--task", question.task);
    if (question.task === "instruction-tuning") parts.push("--dataset", "answers.jsonl");
    if (question.task === "text-classification") parts.push("--dataset", "texts.csv");
    if (question.task === "image-classification") parts.push("--dataset", "photos/");
    else parts.push("--max_length", question.length);
    const gpus = several ? question.gpus : 1;
    const samples = whole ? question.batch : Math.max(16, 2 * question.batch * gpus);
    if (!whole) parts.push("--micro_batch_size", question.batch);
    if (whole || samples !== 16) parts.push("--batch_size", samples);
    if (gpus > 1) parts.push("--devices", gpus);
    if (adapters && question.rank !== FIT.lora_rank) parts.push("--lora_rank", question.rank);
    return join(...parts, ...(options ? options.split(" ") : []));
  }

  // Return the planner's command for a model that the page has no figures of.
  function planCommand(question) {
    const parts = ["python", "scripts/plan_memory.py", "--model", "config.json", "--task", question.task];
    if (question.task !== "image-classification") parts.push("--max_length", question.length, "--length", question.length);
    parts.push("--micro_batch_size", question.batch);
    if (question.gpu === OWN) parts.push("--gpu_memory", `${question.gigabytes}GB`);
    else parts.push("--gpu", question.gpu);
    if (question.gpus > 1) parts.push("--devices", question.gpus);
    parts.push("--host_memory", `${question.host}GB`);
    if (question.rank !== FIT.lora_rank) parts.push("--lora_rank", question.rank);
    return join(...parts);
  }

  // Return the model of the list with the shape of a pasted config.json, or what is wrong with the text.
  function findConfig(text) {
    let config;
    try {
      config = JSON.parse(text);
    } catch (error) {
      return { problem: `The pasted text is not JSON (${error.message}). Paste the whole config.json of a model.` };
    }
    if (!config?.model_type) return { problem: "The pasted JSON has no model_type, so it is not a model's config.json." };
    const same = ([, { shape }]) => Object.entries(shape).every(([name, value]) => config[name] === value);
    return { label: Object.entries(FIT.models).find(same)?.[0], config };
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
    const pasted = given.get("config") ? findConfig(given.get("config")) : {};
    const model = pasted.label ?? choose("model", Object.keys(FIT.models), "Qwen3 8B");
    const unknown = pasted.config && !pasted.label;
    const task = choose("task", Object.keys(unknown ? TASKS : FIT.models[model].tasks), "instruction-tuning");
    const lengths = unknown ? LENGTHS : Object.keys(FIT.models[model].tasks[task]);
    const length = choose("length", lengths, "1024");
    const batch = choose("batch", FIT.sizes, 1);
    const gpus = choose("gpus", FIT.gpu_counts, 1);
    const rank = choose("rank", FIT.lora_ranks, FIT.lora_rank);
    const positive = (name) => (Number(given.get(name)) > 0 ? Number(given.get(name)) : undefined);
    const gpu = given.get("gpu") ?? "RTX 4090";
    const known = FIT.gpus.find(([name]) => name === gpu);
    const own = [OWN, positive("gpu") ?? 24, given.get("old") === "1" ? 1 : 0, 0];
    const [name, gigabytes, old, overhead] = known ?? own;
    const memory = known ? gigabytes * GB : cardMemory(gigabytes);
    if (!known && !positive("gpu")) replaced.push(`gpu ${gpu} (shown: ${OWN})`);
    const usual = gpus * FIT.host_memory;
    const host = choose("host", [positive("host") ?? usual], usual);
    const rest = { show: given.get("show") === "1", row: given.get("row"), replaced, missing: [], pasted, unknown, config: pasted.label ? "" : (given.get("config") ?? "") };
    return { model, task, length, lengths, batch, gpu: name, gigabytes, memory, overhead, host, old, gpus, rank, ...rest };
  }

  function writeQuestion(question) {
    const own = question.gpu === OWN;
    const values = new URLSearchParams({
      model: question.model, task: question.task, length: question.length, batch: question.batch,
      gpu: own ? question.gigabytes : question.gpu,
    });
    if (Number(question.host) !== question.gpus * FIT.host_memory) values.set("host", question.host);
    if (Number(question.gpus) !== 1) values.set("gpus", question.gpus);
    if (Number(question.rank) !== FIT.lora_rank) values.set("rank", question.rank);
    if (question.config) values.set("config", question.config.replace(/\s+/g, " "));
    if (own && question.old) values.set("old", "1");
    if (question.show) values.set("show", "1");
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

  // Return a labelled list to choose from; `texts`: what it shows instead of the values.
  function select(label, name, values, chosen, texts = values) {
    const options = values.map((value, number) =>
      element("option", { value, textContent: texts[number], selected: String(value) === String(chosen) }),
    );
    return field(label, element("select", { name }, ...options));
  }

  function form(question) {
    const { unknown } = question;
    const models = [...(unknown ? [PASTED] : []), ...Object.keys(FIT.models)];
    const tasks = Object.keys(unknown ? TASKS : FIT.models[question.model].tasks);
    const texts = question.task !== "image-classification";
    const own = question.gpu === OWN;
    const names = [...FIT.gpus.map(([name]) => name), OWN];
    const sizes = [...FIT.gpus.map(([name, size]) => `${name}, ${size.toFixed(1)} GB`), OWN];
    const number = (label, name) =>
      field(label, element("input", { name, type: "number", min: "1", max: "10000", step: "any", value: question[name] }));
    const fields = [
      select("Model", "model", models, unknown ? PASTED : question.model),
      select("Task", "task", tasks, question.task, tasks.map((task) => TASKS[task])),
      texts && select("Length in tokens", "length", question.lengths, question.length),
      select("Samples in a micro-batch", "batch", FIT.sizes, question.batch),
      select("GPU", "gpu", names, question.gpu, sizes),
      own && number("Its memory in GB", "gigabytes"),
      own && select("Compute capability", "old", [0, 1], question.old, ["8.0 or higher", "below 8.0"]),
      select("Number of GPUs", "gpus", FIT.gpu_counts, question.gpus),
      number("CPU memory in GB", "host"),
      select("Rank of adapters", "rank", FIT.lora_ranks, question.rank),
      select("What does not fit is", "show", ["", "1"], question.show ? "1" : "", ["hidden", "shown"]),
    ].filter(Boolean);
    const area = element("textarea", { name: "config", id: "fit-config", rows: 5, value: question.config, spellcheck: false });
    const hint = element("label", { htmlFor: area.id, textContent: "Paste the model's config.json" });
    const paste = element("details", { className: "fit-paste", open: Boolean(unknown || question.pasted.problem) },
      element("summary", { textContent: "The model is not in the list" }), hint, area);
    return element("form", { className: "fit-form" }, ...fields, paste);
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
      if (!question.show && rank(row) === 2 && row !== question.chosen) continue;
      const radio = element("input", { type: "radio", name: "row", value: number, checked: row === question.chosen });
      const title = element("span", { className: "fit-title", textContent: `${row.rung.split("_")[0]} · ${row.title}` });
      const size = element("span", { className: "fit-size", textContent: `${gigabytes(row.expected)} GB` });
      const cpu = element("span", { className: "fit-size fit-cpu", textContent: `CPU ${gigabytes(row.host)} GB` });
      const text = row.best ?? VERDICTS[row.verdict];
      const verdict = element("span", { className: `fit-verdict fit-${row.verdict}`, textContent: text });
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

  // Return the measured loss of accuracy in the planner's words.
  const lost = ({ cost }) => (cost === "" ? "none (MiniLM)" : (cost?.replace(" of accuracy", "") ?? "not measured"));

  function table(rows) {
    const names = ["Technique", "Verdict", ...PARTS, "expected", "low", "high", "CPU memory", "samples/s", "loss of accuracy"];
    const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col", textContent: name })));
    const body = rows.map((row) => {
      const values = [...row.parts, row.expected, row.low, row.high, row.host].map((value) => gigabytes(value, 2));
      const cells = [VERDICTS[row.verdict].slice(2), ...values, row.speed ?? "–", lost(row)].map((value) => element("td", { textContent: value }));
      const line = element("tr", {}, element("th", { scope: "row", textContent: `${row.rung}: ${row.title}` }), ...cells);
      line.dataset.command = row.command;
      if (row.best) line.dataset.best = "";
      return line;
    });
    const caption = element("caption", { textContent: `Predicted GPU memory in GB, and CPU memory. Activations include the logits. Measured: samples/s of ${FIT.measured}, and accuracy of text classification with MiniLM at the learning rate of the command.` });
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

  // Return a command with a button that copies it, between a text above and one below.
  function commandBox(above, command, below) {
    const spans = command.split(" ").flatMap((word) => [" ", element("span", { textContent: word })]);
    const code = element("code", {}, ...spans.slice(1));
    const copy = copyButton("Copy the command", () => command, code);
    const last = element("p", { className: "fit-source", textContent: below });
    return element("div", { className: "fit-command" }, element("p", { textContent: above }), element("pre", {}, code), copy, last);
  }

  function rowBox(row) {
    const size = `${gigabytes(row.low)} to ${gigabytes(row.high)} GB and ${gigabytes(row.host)} GB of CPU memory`;
    const speed = row.speed ? `${row.speed} samples/s, measured with ${FIT.measured}` : "not measured";
    const measured = row.cost === null ? "" : `, measured in text classification at this command's learning rate, ${row.rate}`;
    return commandBox(
      `Rung ${row.rung.split("_")[0]}, ${row.title}, takes ${size}, predicted:`,
      row.command,
      `Loss of accuracy${measured}: ${lost(row)}. Speed: ${speed}.`,
    );
  }

  function summary(rows, question) {
    const fitting = rows.filter((row) => row.verdict === "fits");
    const memory = `${gigabytes(question.memory)} GB`;
    const gpu = question.gpu === OWN ? memory : `the ${question.gpu} (${memory})`;
    const count = `${fitting.length} of ${rows.length} ways fit ${gpu} and ${question.host} GB of CPU memory.`;
    const more = rows.some((row) => row.verdict === "host") ? "more CPU memory, " : "";
    return fitting.length ? count : `${count} Try ${more}shorter texts, a smaller micro-batch, or several GPUs.`;
  }

  const page = document.getElementById("fit");
  if (!page) return;
  const status = element("p", { className: "fit-summary" }); // stays, so that screen readers read its changes
  status.setAttribute("role", "status");

  function show(focus) {
    const question = readQuestion();
    const controls = form(question);
    const rows = question.unknown ? [] : answer(question);
    const notes = [
      question.replaced.length && `The address asks for what this page does not have: ${question.replaced.join(", ")}.`,
      question.pasted.problem,
      question.pasted.label && `The pasted config.json has the shape of ${question.pasted.label}.`,
      question.old && !question.unknown &&
        "This GPU does not compute in bfloat16: techniques in bfloat16 are left out, and mixed precision takes float16.",
      question.gpus > 1 && !question.unknown &&
        "Rungs 9, 10 and 12 run on all GPUs. Every other technique is shown on one of them. The figures are those of each GPU.",
    ].filter(Boolean).map((textContent) => element("p", { textContent }));
    if (question.unknown) {
      status.textContent = `The page has no figures of this ${question.pasted.config.model_type} model.`;
      const above = "Save the pasted text as config.json in the project's folder. The planner computes the answer from it:";
      page.replaceChildren(controls, status, ...notes, commandBox(above, planCommand(question), ""));
    } else {
      status.textContent = summary(rows, question);
      page.replaceChildren(controls, status, ...notes, ...results(rows, question));
    }
    controls.addEventListener("submit", (event) => event.preventDefault());
    controls.addEventListener("change", ({ target }) => {
      const changed = { ...question, [target.name]: target.value };
      for (const name of ["gigabytes", "host"]) if (!(Number(changed[name]) > 0)) changed[name] = question[name];
      if (target.name === "old") changed.old = Number(target.value);
      if (target.name === "model") changed.config = "";
      const usual = question.host === question.gpus * FIT.host_memory;
      if (target.name === "gpus" && usual) changed.host = target.value * FIT.host_memory;
      writeQuestion(changed);
      show(target.id);
    });
    if (focus) document.getElementById(focus)?.focus();
  }

  // Return the answer: legend, bars with the command in the chosen row, link, table and source.
  function results(rows, question) {
    const best = (all) => rows.find((row) => row.all === all && row.verdict === "fits");
    for (const row of [best(1), best(0)].filter(Boolean)) { // the planner's answers for all weights, and adapters
      const kind = row.all ? `all weights${/ SGD/.test(row.title) ? " (SGD learns little)" : ""}` : "adapters";
      row.best = row === rows[0] ? "✓ planner's choice" : `✓ choice for ${kind}`;
    }
    const known = rows.find((row) => `${row.rung} ${row.title}` === question.row);
    const least = rows.reduce((one, other) => (other.high < one.high ? other : one));
    question.chosen = known ?? rows.find((row) => row.best) ?? least;
    const { made } = FIT.models[question.model];
    const all = (name) => [...new Set(made.map((each) => each[name]))].join(", ");
    const source = `Predicted at commit ${all("commit")} with PyTorch ${all("torch")} and transformers ${all("transformers")}.`;
    const missing = `The page has no figures of this model for ${question.missing.join("; ")}. The planner has them.`;
    const answers = bars(rows, question);
    const box = element("div", {}, rowBox(question.chosen));
    const place = () => answers.querySelector("input:checked").closest("label").after(box);
    place();
    answers.addEventListener("change", ({ target }) => {
      const row = rows[Number(target.value)];
      writeQuestion({ ...question, row: `${row.rung} ${row.title}` });
      box.replaceChildren(rowBox(row));
      place();
    });
    const link = element("span", { className: "fit-source" });
    return [
      legend(question), answers,
      element("p", {}, copyButton("Copy a link to this answer", () => location.href, link), " ", link),
      element("details", {}, element("summary", { textContent: "The figures as a table" }), table(rows)),
      element("p", { className: "fit-source", textContent: question.missing.length ? `${source} ${missing}` : source }),
    ];
  }

  addEventListener("hashchange", () => show());
  const data = element("script", { src: new URL("data.js", home).href });
  data.addEventListener("load", () => show());
  document.head.append(data);
})();
