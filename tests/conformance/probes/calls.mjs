// Calls of a client for Node, told one by one as calls.py tells them.
export const facts = JSON.parse(process.env.CONFORMANCE_FACTS);
const skipped = (process.env.CONFORMANCE_SKIPPED ?? "").split("\n");

export async function report(calls) {
  for (const [call, function_] of Object.entries(calls)) {
    if (skipped.includes(call)) continue;
    let fault = "";
    try {
      await function_();
    } catch (error) {
      console.error(error);
      fault = `${error.name}: ${error.message}`;
    }
    console.log(`{"call": ${JSON.stringify(call)}, "fault": ${JSON.stringify(fault)}}`);
  }
}
