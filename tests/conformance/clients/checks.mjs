// What the scripts of JavaScript clients share.

export const url = process.env.CONFORMANCE_URL;
export const model = process.env.CONFORMANCE_MODEL;
export const question = "What is the capital of France?";
export const word = "Paris";

export async function check(name, work) {
  let ok = true;
  let detail = "";
  try {
    detail = (await work()) ?? "";
  } catch (error) {
    ok = false;
    detail = String(error);
    console.error(name, error);
  }
  console.log(JSON.stringify({ check: name, ok, detail: String(detail) }));
}

export function expect(condition, what) {
  if (!condition) throw new Error(`not so: ${what}`);
}
